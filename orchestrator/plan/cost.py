"""Time, traffic and price of a run as the plan's sections, from a configuration and its decided degrees.

Owns the translation of `step_seconds.py` and `rank_traffic.py` into the plan's JSON contract: tokens a second, MFU,
days, GPU-hours, money. What the hardware entry does not state leaves the figures that need it None.
"""

from __future__ import annotations

from orchestrator.config.schema import RunConfig
from orchestrator.plan.batch import steps_of
from orchestrator.plan.device import Device, device_of
from orchestrator.plan.rank_traffic import rank_traffic
from orchestrator.plan.run_plan import CostPlan, ParallelFacts, TimePlan, Traffic, TrafficPlan
from orchestrator.plan.step_seconds import StepSeconds, loads, step_seconds
from orchestrator.plan.system_profile import SystemProfile
from orchestrator.plan.traffic import host_transfer
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


def traffic_plan(work: Work, profile: SystemProfile) -> TrafficPlan:
    """Input payload and calls of one step, each kind for the pipeline rank that has most of it."""
    ranks = loads(work)
    found = [rank_traffic(work, profile, load, rank) for rank, load in enumerate(ranks)]
    host = [host_transfer(work, profile, load.elements) for load in ranks] if work.offload else []
    sizes = [(round(moved.input_bytes), round(moved.calls)) for moved in host] or [(0, 0)]
    return TrafficPlan(
        **{axis: Traffic(*max(each[axis] for each in found)) for axis in found[0]}, offload=Traffic(*max(sizes))
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
