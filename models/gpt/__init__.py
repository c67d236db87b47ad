"""The `gpt` family: GPT-2 and GPT-3."""
