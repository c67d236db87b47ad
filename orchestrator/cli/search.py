"""`search`: every legal plan for this model on this hardware, best first. No GPU, no Ray, no torch.

The work is `plan/search.py`'s; here the configuration is judged, the nodes of `cluster.nodes=auto` are found, and the
result printed. Exit 2 when no plan fits.
"""

from __future__ import annotations

import json
import sys

from orchestrator.cli.invocation import Invocation
from orchestrator.cli.show import page_console
from orchestrator.config.schema import RunConfig
from orchestrator.errors import PlanError
from orchestrator.plan.auto import fewest_nodes, no_plan_fits, plain, with_nodes
from orchestrator.plan.facts import derive
from orchestrator.plan.inventory import take_inventory
from orchestrator.plan.search import search
from orchestrator.plan.validate import rules, size_rules

HELP = """\
python -m orchestrator search [+experiment=NAME] [GROUP=OPTION ...] [KEY=VALUE ...] [--json]

Looks, without a GPU, through every legal split of the model over the cluster: data, tensor, pipeline and context
degrees, ZeRO stages and groups, schedules, micro-batches, recomputation. Prints those that fit, fastest first (of
those within 0.1 % of each other the one with the fewest mechanisms), and why the others do not. Never varied: the
model, the precision, the global batch, the sequence, the optimizer.
The values under `parallel`, training.micro_batch_size and training.activation_checkpointing are what it looks for.
Exit code 0: some plan fits; 2: none does, or the configuration is refused.

  python -m orchestrator search +experiment=llama70b_3d
  python -m orchestrator search +experiment=llama70b_3d cluster.nodes=auto     (how many nodes are needed)
  python -m orchestrator plan   +experiment=llama70b_3d parallel=auto          (the best one, as a plan)
"""

FLAGS = ("--json",)


def run(invocation: Invocation) -> int:
    """Print what was found. Raises ConfigError for the configuration, PlanError when no plan is possible."""
    config = _on_a_number_of_nodes(invocation.load())
    found = search(config)
    if invocation.json:
        from orchestrator.plan.explain_search import search_dict

        json.dump(search_dict(config, found), sys.stdout, indent=2, allow_nan=False)
        sys.stdout.write("\n")
        sys.stdout.flush()
    else:
        from orchestrator.plan.explain_search import render_search

        render_search(config, found, page_console())
    if not found.ranked:
        raise PlanError(no_plan_fits(config, fewest_nodes(config)))
    return 0


def _on_a_number_of_nodes(config: RunConfig) -> RunConfig:
    problems = tuple(size_rules.absurd_sizes(config)) or rules.check(derive(plain(config)))
    if problems:
        raise PlanError(problems)
    if not take_inventory(config.cluster).open_ended:
        return config
    nodes = fewest_nodes(config)
    if nodes is None:
        raise PlanError(no_plan_fits(config, None))
    return with_nodes(config, nodes)
