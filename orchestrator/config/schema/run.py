"""`run data checkpoint tracking fault_tolerance`: where things come from and go, and what is done when they fail."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from orchestrator.config.schema.base import AboveOne, Count, CountOrZero, Fraction, Positive, PositiveOrZero, Section


class RunSection(Section):
    """Name and place of the run."""

    name: str | None = None
    """Name of the run and of its folder; null: the experiment's and a short hash of what changes what is learned."""
    directory: str = "runs"
    """Folder in which each run has a folder of its own name."""
    experiment: str = "quickstart"
    """Name of the experiment; set from `+experiment=NAME`."""


class DataConfig(Section):
    """What is learned from."""

    source: Literal["python_stdlib", "text", "synthetic"] = "python_stdlib"
    """`python_stdlib`: the source of Python's standard library; `text`: files at `path`; `synthetic`: random tokens."""
    path: str | None = None
    """`text`: a file, a folder (every file below it but hidden ones) or a glob, UTF-8 text."""
    tokenizer: str = "bytes"
    """`bytes` (UTF-8 bytes and an end-of-text token, 257 ids) or the path of a `tokenizer.json`."""
    validation_fraction: Fraction = 0.05
    """Share of the documents kept for validation (0 to 1)."""
    cache_directory: str | None = None
    """Folder of the token cache; null: `~/.cache/orchestrator`, or under `XDG_CACHE_HOME`."""


class CheckpointConfig(Section):
    """What is saved and what a run starts from."""

    directory: str | None = None
    """Folder or `s3://BUCKET/PREFIX` for each run's checkpoints, under the run's name; null: in the run's folder."""
    every_steps: CountOrZero = 100
    """Steps between checkpoints; 0: only by minutes, at a stop and at the end."""
    every_minutes: Positive | None = None
    """Minutes between checkpoints, beside `every_steps`; null: not by time."""
    keep_last: Count = 2
    """Newest checkpoints that are kept. What the run went on from is kept too."""
    keep_every_steps: Count | None = None
    """Checkpoints of steps that are multiples of this are kept for good; null: none for that."""
    keep_best: CountOrZero = 0
    """Checkpoints with the lowest validation losses that are kept; above 0 each new lowest loss is saved at once."""
    asynchronous: bool = True
    """Whether training goes on while a checkpoint is written."""
    on_failure: Literal["continue", "stop"] = "continue"
    """What a checkpoint that cannot be written does: a warning and the run goes on, or the run stops."""
    resume: str = "auto"
    """`auto`: an unfinished run of this name is continued; `never`: always a new run; or the path of a checkpoint."""
    init_from: str | None = None
    """Weights to start from: a checkpoint or a Hugging Face folder; null: random weights."""


class TrackingConfig(Section):
    """The MLflow record."""

    uri: str | None = None
    """MLflow tracking URI; null: `MLFLOW_TRACKING_URI`, or `sqlite:///mlflow.db` in the current folder."""
    experiment: str = "orchestrator"
    """Name of the MLflow experiment."""
    run_name: str | None = None
    """Name of the MLflow run; null: the run's name."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Tags of the MLflow run."""


class FaultToleranceConfig(Section):
    """What is done when something fails. Each class of failures has a budget of its own."""

    max_restarts: CountOrZero = 3
    """Times that ranks which crashed are started again before the run is given up."""
    max_hangs: CountOrZero | None = None
    """Times that ranks which hung are started again; null: as `max_restarts`."""
    max_node_losses: CountOrZero | None = None
    """Times that the run is placed anew after a node or its supervisor was lost; null: as `max_restarts`."""
    max_preemptions: CountOrZero = 100
    """Times that the run saves and moves off a node that is about to be taken away."""
    max_rewinds: CountOrZero = 3
    """Times that `on_nan: rewind` goes back to a checkpoint."""
    grace_seconds: Positive = 30.0
    """Seconds that a stopping run has for its last checkpoint, also after a preemption notice."""
    step_timeout_seconds: Positive = 600.0
    """Seconds without progress after which a rank counts as hung."""
    start_timeout_seconds: Positive = 300.0
    """Seconds that the ranks have until their first step."""
    network_timeout_seconds: Positive = 60.0
    """Seconds that ranks have to connect and to finish one small all-reduce in every group before the first step."""
    placement_timeout_seconds: PositiveOrZero = 60.0
    """Seconds to wait for GPUs that are busy now; 0: do not wait."""
    replan_after_seconds: PositiveOrZero | None = 120.0
    """Seconds that lost nodes have to come back, from when the loss was noticed, before the run goes on with fewer data
    ranks at the same global batch; null: it never does."""
    preemption_file: str | None = None
    """File whose appearance on a node says that the node is about to be taken away; null: only Ray's notices count."""
    on_nan: Literal["stop", "skip", "rewind"] = "stop"
    """What happens when the loss or the gradient is not a number: stop the run, skip the step, or go back to the newest
    checkpoint and leave the step out."""
    max_skipped_steps: CountOrZero = 10
    """Steps in a row that `on_nan: skip` may leave out before the run is stopped."""
    spike_factor: AboveOne | None = None
    """A loss above this many times the median of the last 32 steps counts as `on_nan` counts one that is not a number;
    null: spikes are not looked for."""
