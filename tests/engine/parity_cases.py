"""The plans that must all be the same training, by ranks; `FAST` are those of the default test run."""

from __future__ import annotations

from dataclasses import replace

from tests.engine.parity import Case
from tests.engine.reference import PLAIN, Recipe

CLIPPED = Recipe(clip=1.0)
GPT = {"model__family": "gpt", "model__num_key_value_heads": None}
TIED = {"model__tie_word_embeddings": True}
UNEVEN = {"model__vocab_size": 97}
"""A vocabulary that no number of tensor ranks shares evenly."""


def case(name: str, mask: str = "none", recipe: Recipe = PLAIN, **changes: object) -> Case:
    return Case(name, dict(changes), mask, recipe)  # type: ignore[arg-type]


def zero(data: int, stage: int) -> dict[str, object]:
    return {"parallel__data": data, "parallel__zero_stage": stage, "training__micro_batch_size": 1}


def recompute(kind: str) -> dict[str, object]:
    return {"training__activation_checkpointing": kind}


def tensor(ranks: int, sequence_parallel: bool = False) -> dict[str, object]:
    return {"parallel__tensor": ranks, "parallel__sequence_parallel": sequence_parallel}


def pipeline(ranks: int, schedule: str) -> dict[str, object]:
    several = schedule not in ("gpipe", "1f1b")
    return {
        "parallel__pipeline": ranks,
        "parallel__schedule": schedule,
        "parallel__virtual_stages": 2 if several else 1,
        "model__num_hidden_layers": 4,
        "training__micro_batch_size": 1,
    }


def three_dimensions(stage: int, schedule: str) -> dict[str, object]:
    return zero(2, stage) | pipeline(2, schedule) | tensor(2)


THREE_TIED = {
    **three_dimensions(3, "1f1b"),
    **TIED,
    **tensor(2, True),
    **recompute("full"),
    "parallel__stage_layers": (3, 1),
}

CASES: dict[int, list[Case]] = {
    1: [
        case("whole batch at once", training__micro_batch_size=8),
        case("accumulation", training__micro_batch_size=2, recipe=CLIPPED),
        case("tied", mask="ragged", **TIED),
        case("no valid token at all", mask="all empty"),
    ],
    2: [
        case("data 2", parallel__data=2, training__micro_batch_size=4),
        case("data 2, accumulation 4", "ragged", CLIPPED, parallel__data=2, training__micro_batch_size=1),
        case("data 2, tied", "ragged", parallel__data=2, **TIED),
        case("data 2, tied, accumulation 4", "ragged", CLIPPED, parallel__data=2, training__micro_batch_size=1, **TIED),
        case("data 2, one rank without a valid token", "first rank empty", CLIPPED, parallel__data=2),
        case("data 2, no valid token at all", "all empty", parallel__data=2),
        *(
            case(f"ZeRO-{stage}", "ragged", **(zero(2, stage) | {"training__micro_batch_size": 4}))
            for stage in (1, 2, 3)
        ),
        *(
            case(f"ZeRO-{stage}, accumulation 4, tied", "ragged", CLIPPED, **zero(2, stage), **TIED)
            for stage in (1, 2, 3)
        ),
        *(
            case(f"ZeRO-{stage}, one rank without a valid token", "first rank empty", CLIPPED, **zero(2, stage))
            for stage in (1, 2, 3)
        ),
        case("data 2, offload", parallel__data=2, parallel__offload="all"),
        case("gpt", "ragged", CLIPPED, parallel__data=2, **GPT),
        case("gpt, tied, ZeRO-3, accumulation 4", "ragged", **zero(2, 3), **GPT, **TIED, **recompute("selective")),
        case("full recompute", "ragged", CLIPPED, parallel__data=2, training__activation_checkpointing="full"),
        case("selective recompute", parallel__data=2, training__activation_checkpointing="selective"),
        case("tensor 2", "ragged", **tensor(2)),
        case("tensor 2, sequence parallel, accumulation 4", "ragged", CLIPPED, **tensor(2, True)),
        case("tensor 2, tied, recompute", "ragged", CLIPPED, **tensor(2), **TIED, **recompute("full")),
        case("tensor 2, uneven vocabulary", "ragged", **tensor(2, True), model__vocab_size=97),
        case("tensor 2, gpt", "ragged", **tensor(2), **GPT, **TIED),
        case("tensor 2, gpt, sequence parallel", "ragged", **tensor(2, True), **GPT, **recompute("selective")),
        *(
            case(f"pipeline 2, {schedule}", "ragged", CLIPPED, **pipeline(2, schedule))
            for schedule in (
                "gpipe",
                "1f1b",
                "interleaved_1f1b",
                "interleaved_zero_bubble",
                "zbv_zero_bubble",
                "dualpipev",
            )
        ),
        case("pipeline 2, tied", "ragged", CLIPPED, **pipeline(2, "1f1b"), **TIED),
        case("pipeline 2, tied, V-shaped", "ragged", CLIPPED, **pipeline(2, "zbv_zero_bubble"), **TIED),
        case(
            "pipeline 2, uneven cut, recompute",
            **pipeline(2, "1f1b"),
            **recompute("full"),
            parallel__stage_layers=(3, 1),
        ),
        case("pipeline 2, gpt, tied", **pipeline(2, "interleaved_1f1b"), **GPT, **TIED),
        *(
            case(f"ZeRO-{stage}, {kind} recompute, accumulation 4", "ragged", **zero(2, stage), **recompute(kind))
            for stage, kind in ((1, "selective"), (2, "full"), (3, "full"), (3, "selective"))
        ),
        case("ZeRO-3, offload", "ragged", CLIPPED, **zero(2, 3), parallel__offload="all"),
    ],
    4: [
        case("pipeline 2, data 2, tied", "first rank empty", CLIPPED, **pipeline(2, "1f1b"), **TIED, parallel__data=2),
        *(
            case(f"pipeline 2, ZeRO-{stage}, {schedule}", "ragged", CLIPPED, **(zero(2, stage) | pipeline(2, schedule)))
            for stage, schedule in (
                (1, "1f1b"),
                (2, "1f1b"),
                (3, "gpipe"),
                (3, "interleaved_1f1b"),
                (2, "interleaved_zero_bubble"),
                (3, "zbv_zero_bubble"),
            )
        ),
        case("pipeline 2, ZeRO-3, tied", "ragged", **(zero(2, 3) | pipeline(2, "1f1b")), **TIED),
        case("pipeline 2, tensor 2", "ragged", CLIPPED, **pipeline(2, "1f1b"), **tensor(2), **TIED),
        case("pipeline 2, tensor 2, sequence parallel", "ragged", **pipeline(2, "interleaved_1f1b"), **tensor(2, True)),
        case("pipeline 4", "ragged", **pipeline(4, "1f1b"), **TIED),
        case("pipeline 2, ZeRO-3, offload", **(zero(2, 3) | pipeline(2, "1f1b")), parallel__offload="all"),
        case(
            "pipeline 2, ZeRO-2, gpt, selective recompute",
            "ragged",
            CLIPPED,
            **(zero(2, 2) | pipeline(2, "interleaved_1f1b")),
            **GPT,
            **recompute("selective"),
        ),
        case("tensor 2, data 2", "ragged", CLIPPED, **tensor(2), parallel__data=2),
        case(
            "tensor 2, data 2, sequence parallel, tied", "first rank empty", **tensor(2, True), parallel__data=2, **TIED
        ),
        case("tensor 4", "ragged", **tensor(4), model__num_key_value_heads=4),
        *(
            case(f"tensor 2, ZeRO-{stage}", "ragged", CLIPPED, **(zero(2, stage) | tensor(2, stage == 2)))
            for stage in (1, 2, 3)
        ),
        case(
            "tensor 2, data 2, uneven vocabulary", "ragged", **tensor(2, True), parallel__data=2, model__vocab_size=97
        ),
        *(
            case(f"tensor 2, ZeRO-{stage}, uneven vocabulary", "ragged", CLIPPED, **zero(2, stage), **tensor(2), **more)
            for stage, more in ((1, UNEVEN), (2, UNEVEN | GPT), (3, UNEVEN | TIED))
        ),
        case(
            "pipeline 2, tensor 2, tied, uneven vocabulary",
            "ragged",
            **pipeline(2, "1f1b"),
            **tensor(2, True),
            **TIED,
            **UNEVEN,
        ),
        case(
            "tensor 4, vocabulary of less than one row a rank",
            **tensor(4),
            model__num_key_value_heads=4,
            model__vocab_size=9,
        ),
        *(
            case(f"hybrid: ZeRO-{stage} in groups of 2", "ragged", CLIPPED, **zero(4, stage), parallel__zero_group=2)
            for stage in (1, 2, 3)
        ),
        case("data 4", "ragged", CLIPPED, parallel__data=4, training__micro_batch_size=1),
        case("data 4, one rank without a valid token", "first rank empty", parallel__data=4),
    ],
    8: [
        *(
            case(f"3D, ZeRO-{stage}, {schedule}", "ragged", CLIPPED, **three_dimensions(stage, schedule))
            for stage, schedule in ((0, "1f1b"), (1, "gpipe"), (2, "1f1b"), (3, "interleaved_1f1b"), (3, "dualpipev"))
        ),
        case("3D, ZeRO-3, tied, sequence parallel, recompute", "first rank empty", **THREE_TIED),
        case(
            "tensor 4, ZeRO-3, uneven vocabulary",
            "ragged",
            CLIPPED,
            **zero(2, 3),
            **tensor(4),
            **UNEVEN,
            model__num_key_value_heads=4,
        ),
        case(
            "tensor 2, hybrid: ZeRO-2 in groups of 2, uneven vocabulary",
            "ragged",
            **zero(4, 2),
            **tensor(2),
            **UNEVEN,
            **TIED,
            parallel__zero_group=2,
        ),
        case("3D, ZeRO-3, uneven vocabulary", "ragged", **three_dimensions(3, "1f1b"), **UNEVEN, **TIED),
        case("3D, gpt, ZeRO-2", "ragged", CLIPPED, **three_dimensions(2, "1f1b"), **GPT),
        case("pipeline 2, hybrid: ZeRO-3 in groups of 2", **(zero(4, 3) | pipeline(2, "1f1b")), parallel__zero_group=2),
        case(
            "tensor 2, hybrid: ZeRO-3 in groups of 2, tied",
            "first rank empty",
            CLIPPED,
            **(zero(4, 3) | tensor(2, True)),
            **TIED,
            parallel__zero_group=2,
        ),
        case("tensor 4, ZeRO-2", "ragged", CLIPPED, **(zero(2, 2) | tensor(4)), model__num_key_value_heads=4),
        case("pipeline 4, tensor 2, gpt", "ragged", CLIPPED, **(pipeline(4, "1f1b") | tensor(2)), **GPT, **TIED),
        case("3D, ZeRO-1, zbv_zero_bubble, tied", "ragged", **three_dimensions(1, "zbv_zero_bubble"), **TIED),
        case("ZeRO-3 over 8", "first rank empty", CLIPPED, **zero(8, 3)),
    ],
}


EXACT = {
    1: {"accumulation", "tied"},
    2: {
        "data 2, tied, accumulation 4",
        "ZeRO-1, accumulation 4, tied",
        "ZeRO-2, one rank without a valid token",
        "ZeRO-3, accumulation 4, tied",
        "tensor 2, sequence parallel, accumulation 4",
        "tensor 2, tied, recompute",
        "tensor 2, gpt",
    },
    4: {
        "hybrid: ZeRO-2 in groups of 2",
        "tensor 2, ZeRO-3, uneven vocabulary",
        "pipeline 2, gpipe",
        "tensor 4",
        "pipeline 2, ZeRO-3, interleaved_1f1b",
        "pipeline 2, tensor 2",
    },
    8: {"3D, ZeRO-3, tied, sequence parallel, recompute"},
}
"""Cases that also run in FP64, by ranks."""


def exact(case: Case) -> Case:
    return replace(case, name=f"{case.name}, FP64", double=True)


for world, names in EXACT.items():
    CASES[world] += [exact(one) for one in CASES[world] if one.name in names]


ALL = [one for cases in CASES.values() for one in cases]

FAST = {
    "accumulation",
    "tied, FP64",
    "no valid token at all",
    "data 2, tied, accumulation 4",
    "data 2, one rank without a valid token",
    "data 2, no valid token at all",
    "ZeRO-1, accumulation 4, tied",
    "ZeRO-2, one rank without a valid token",
    "ZeRO-3, accumulation 4, tied, FP64",
    "data 2, offload",
    "gpt, tied, ZeRO-3, accumulation 4",
    "selective recompute",
    "ZeRO-2, full recompute, accumulation 4",
    "tensor 2, sequence parallel, accumulation 4",
    "tensor 2, uneven vocabulary",
    "tensor 2, gpt, FP64",
    "tensor 2, data 2, sequence parallel, tied",
    "tensor 2, ZeRO-3",
    "hybrid: ZeRO-2 in groups of 2, FP64",
    "pipeline 2, dualpipev",
    "pipeline 2, gpt, tied",
    "pipeline 2, tied, V-shaped",
    "pipeline 2, ZeRO-2, 1f1b",
    "pipeline 2, ZeRO-3, interleaved_1f1b, FP64",
    "pipeline 2, tensor 2, sequence parallel",
}
assert {one.name for one in ALL} >= FAST
