"""Time, traffic and price of a run as the plan's sections, from a configuration and its decided degrees.

Owns the translation of `step_seconds.py` and `traffic.py` into the plan's JSON contract: tokens a second, MFU, days,
GPU-hours, money. What the hardware entry does not state leaves the figures that need it None.
"""

from __future__ import annotations

from orchestrator.config.schema import RunConfig
from orchestrator.plan.batch import steps_of
from orchestrator.plan.device import Device, device_of
from orchestrator.plan.run_plan import CostPlan, ParallelFacts, TimePlan, Traffic, TrafficPlan
from orchestrator.plan.step_seconds import StepSeconds, loads, step_seconds
from orchestrator.plan.system_profile import SystemProfile
from orchestrator.plan.traffic import (
    Transfer,
    boundary_bytes,
    boundary_sends,
    context_transfers,
    data_transfers,
    host_transfer,
    loss_transfers,
    tensor_transfers,
)
from orchestrator.plan.work import Work, work_of

_SECONDS_A_DAY = 86400.0


def step_time(config: RunConfig, parallel: ParallelFacts, profile: SystemProfile) -> tuple[TimePlan, TrafficPlan]:
    """Time of a step and of the run, and the traffic of the busiest rank. `config` has a uniform cluster."""
    work = work_of(config, parallel)
    device = device_of(config.cluster, config.training.precision)
    return _time_plan(config, work, device, step_seconds(work, profile, device)), traffic_plan(work, profile)


def model_share(work: Work, device: Device, step_seconds: float) -> float | None:
    """MFU: model FLOP/s of a step over the peak of the precision (0 to 1); None when the peak is not known."""
    if device.peak_flops is None:
        return None
    rate = work.tokens_per_step / step_seconds / work.parallel.world_size
    return rate * work.architecture.flops_per_token(work.seen) / device.peak_flops


def _time_plan(config: RunConfig, work: Work, device: Device, seconds: StepSeconds | None) -> TimePlan:
    if seconds is None:
        return TimePlan()
    step, ranks = seconds.step, work.parallel.world_size
    rate = work.tokens_per_step / step
    steps = steps_of(config.training)
    return TimePlan(
        step_seconds=step,
        compute_seconds=seconds.compute,
        tensor_seconds=seconds.tensor,
        pipeline_seconds=seconds.pipeline,
        bubble_seconds=seconds.bubble,
        context_seconds=seconds.context,
        data_seconds=seconds.data,
        optimizer_seconds=seconds.optimizer,
        offload_seconds=seconds.offload,
        overlapped_seconds=seconds.overlapped,
        tokens_per_second=rate,
        tokens_per_second_per_gpu=rate / ranks,
        mfu=model_share(work, device, step),
        bubble_fraction=seconds.bubble_fraction,
        days=None if steps is None else steps * step / _SECONDS_A_DAY,
    )


def _traffic(transfers: tuple[Transfer, ...]) -> Traffic:
    return Traffic(
        bytes=round(sum(transfer.input_bytes for transfer in transfers)),
        calls=round(sum(transfer.calls for transfer in transfers)),
    )


def traffic_plan(work: Work, profile: SystemProfile) -> TrafficPlan:
    """Input payload and calls of one step, each kind for the pipeline rank that has most of it."""
    ranks = loads(work)

    def most(candidates: list[Traffic]) -> Traffic:
        return max(candidates, key=lambda traffic: traffic.bytes or 0)

    sends = [boundary_sends(work, rank) for rank in range(work.parallel.pipeline)]
    return TrafficPlan(
        tensor=most(
            [
                _traffic(
                    (
                        *tensor_transfers(work, profile, load.layers, int(load.embedding) + int(load.head)),
                        *(loss_transfers(work, profile) if load.head else ()),
                    )
                )
                for load in ranks
            ]
        ),
        pipeline=most([Traffic(round(count * boundary_bytes(work, profile)), count) for count in sends]),
        context=most([_traffic(context_transfers(work, load.layers)) for load in ranks]),
        data=most(
            [
                _traffic(data_transfers(work, profile, load.elements, load.units(work.architecture.tied)).all)
                for load in ranks
            ]
        ),
        offload=most(
            [
                _traffic((host_transfer(work, profile, load.elements),)) if work.offload else Traffic(0, 0)
                for load in ranks
            ]
        ),
    )


def cost_plan(config: RunConfig, parallel: ParallelFacts, time: TimePlan) -> CostPlan:
    """GPU-hours of the run, and their price where the GPU entry has one. `config` has a uniform cluster."""
    gpu = config.cluster.gpu
    hours = None if time.days is None else time.days * 24.0 * parallel.world_size
    price = gpu.price_per_hour
    return CostPlan(
        gpu_hours=hours,
        price_per_gpu_hour=price,
        total=None if hours is None or price is None else hours * price,
        currency=None if price is None else gpu.price_currency,
    )
