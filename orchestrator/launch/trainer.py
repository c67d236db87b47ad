"""One attempt on Ray Train: a `fit` without retries of its own that places and holds the supervisors.

Ray Train starts one worker a share, watches it and frees its resources. Restarting, waiting and giving up are
`run.py`'s.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.launch.inventory import NODE_LABEL, resource_of
from orchestrator.launch.session import cluster_address
from orchestrator.launch.supervisor import SupervisorOrder, supervise
from orchestrator.placement.topology import ShareChoice

_LEFT_OUT = ("PlacementGroupCleanerCallback", "DatasetsCallback")
"""The first cleans placement groups up after a driver that died, which Ray's own job clean-up does as well, and needs a
dashboard; the second hands out Ray Data sets, of which there are none. Each would start one more Python process."""


def start_attempt(
    order: SupervisorOrder, choice: ShareChoice, storage: Path, ended: Callable[[BaseException | None], None]
) -> threading.Thread:
    """Begin a `fit` in a thread of its own; `ended` is called from there with its error, or None.

    In a thread, because `fit` blocks and because Ray Train takes over Ctrl-C when it runs in the main one.
    """
    trainer = _make_trainer(order, choice, storage)

    def fit() -> None:
        error: BaseException | None = None
        try:
            trainer.fit()
        except BaseException as caught:
            error = caught
        ended(error)

    thread = threading.Thread(target=fit, name=f"attempt-{order.attempt}", daemon=True)
    thread.start()
    return thread


def take_back(placement_group: str) -> None:
    """Free what a `fit` holds on its nodes, whether it has ended or not; its workers there end. By the group's id."""
    from ray import PlacementGroupID
    from ray.util import remove_placement_group
    from ray.util.placement_group import PlacementGroup

    remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(placement_group)))


def share_resources(device: str, choice: ShareChoice) -> dict[str, float]:
    """What Ray holds for one share: all its slots in one bundle, so that they lie on one node."""
    return {resource_of(device): choice.share_size}


def share_pins(choice: ShareChoice) -> list[dict[str, str]]:
    """Labels that bind each share to its node."""
    return [{NODE_LABEL: node_id} for node_id in choice.node_ids]


def _make_trainer(order: SupervisorOrder, choice: ShareChoice, storage: Path) -> Any:
    import ray.train
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    # Ray exports the classes of its second version under the names of the first, which type checkers see.
    api: Any = ray.train

    class SupervisorTrainer(DataParallelTrainer):
        """Without what only costs time here; a cluster of our own has no autoscaler to speak with either."""

        def _create_default_callbacks(self) -> list[Any]:
            callbacks = super()._create_default_callbacks()
            return [callback for callback in callbacks if type(callback).__name__ not in _LEFT_OUT]

        def _initialize_and_run_controller(self, **controller: Any) -> Any:
            if cluster_address() is None:
                from orchestrator.launch.own_cluster import NodesAsTheyAre

                controller["scaling_policy"] = NodesAsTheyAre(controller["scaling_policy"].scaling_config)
            return super()._initialize_and_run_controller(**controller)

    return SupervisorTrainer(
        functools.partial(supervise, order),
        scaling_config=api.ScalingConfig(
            num_workers=len(choice.node_ids),
            use_gpu=order.device == "cuda",
            resources_per_worker=share_resources(order.device, choice),
            label_selector=share_pins(choice),
        ),
        run_config=api.RunConfig(
            name=f"attempt-{order.attempt}",
            storage_path=str(storage),
            failure_config=api.FailureConfig(max_failures=0, controller_failure_limit=0),
        ),
    )
