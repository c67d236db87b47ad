"""Judging a configuration: every rule is one function from `Facts` to the problems it finds; all are evaluated.

A rule whose inputs are already wrong by another rule finds nothing, so that one mistake gives one problem. Nothing is
changed here. What today's engine cannot run although a plan could is `engine_rules.py`; whether it fits is `make.py`.
"""
