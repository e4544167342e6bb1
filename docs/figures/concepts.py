"""Pictures of the concepts, drawn from the objects that they explain."""

from __future__ import annotations

import configparser
from collections.abc import Sequence
from pathlib import Path

from docs.figures.drawing import (
    AXES,
    BLUE,
    GREEN,
    GREY,
    INK,
    LINE,
    ORANGE,
    PALE,
    PAPER,
    PURPLE,
    RED,
    TEAL,
    TINTS,
    Picture,
)
from neuron_accel import (
    FullyShardedPlugin,
    ModelParallelismPlugin,
    PipelineParallelPlugin,
    SequenceParallelPlugin,
    StrategyPlugin,
    TensorParallelPlugin,
    Zero1Plugin,
)
from neuron_accel.commands import dry_plan
from neuron_accel.contract import AxisKind, AxisSpec, Claim, Cut, Layout, Mesh, Phase, Plan
from neuron_accel.engine.plan.registry import default_registry

RANKS = (BLUE, ORANGE, GREEN, PURPLE)


def plan_of(plugins: Sequence[StrategyPlugin], ranks: int) -> Plan:
    """The plan of a run of ``ranks`` CPU ranks, as ``prepare`` would make it."""
    return dry_plan([part for plugin in plugins for part in (plugin.companions() or (plugin,))], world_size=ranks)


def eight_ranks() -> Plan:
    """The plan that the pictures of mesh and plan show."""
    parallel = ModelParallelismPlugin(tensor_parallel_size=2, pipeline_parallel_size=2)
    return plan_of([Zero1Plugin(), SequenceParallelPlugin(), parallel], 8)


# ---- Mesh ------------------------------------------------------------------------------------------------------------
def mesh() -> Picture:
    made = eight_ranks().mesh
    picture = Picture(796, 400, f"A mesh of {made.world_size} ranks: {made}")
    picture.text(24, 32, f"{made.world_size} ranks as a mesh: {made}", size=16, bold=True)
    cell, high = 132, 58
    at = {}
    for rank in range(made.world_size):
        c = made.coordinates(rank)
        at[rank] = (48 + c["pp"] * 386 + c["tp"] * 182, 92 + c["dp"] * 128)
    for stage in range(made.degree("pp")):
        x = 28 + stage * 386
        picture.box(x, 62, 354, 240, fill="#f7f4fb", line=TINTS[PURPLE])
        picture.text(x + 177, 189, f"stage {stage}", colour=PURPLE, anchor="middle", bold=True)
    for group in made.groups("tp"):
        (x0, y0), (x1, _) = at[group[0]], at[group[-1]]
        picture.path(f"M{x0 + cell + 2:g} {y0 + 29:g} H{x1 - 2:g}", AXES["tp"], weight=2.5, start=True, end=True)
    for group in made.groups("dp"):
        (x0, y0), (_, y1) = at[group[0]], at[group[-1]]
        picture.path(f"M{x0 + 66:g} {y0 + high + 2:g} V{y1 - 2:g}", AXES["dp"], weight=2.5, start=True, end=True)
    for number, group in enumerate(made.groups("pp")):
        (x0, y0), (x1, _) = at[group[0]], at[group[-1]]
        top, upper = number % made.degree("tp") == 0, number < made.degree("tp")
        if not top:
            continue
        y = y0 if upper else y0 + high
        bend = y - 18 if upper else y + 14
        picture.path(f"M{x0 + 40} {y} V{bend} H{x1 + 40} V{y - 2 if upper else y + 2}", AXES["pp"], weight=2, end=True)
    for rank, (x, y) in at.items():
        picture.box(x, y, cell, high, line=GREY)
        picture.text(x + cell / 2, y + 25, f"rank {rank}", bold=True, anchor="middle", size=14)
        where = ", ".join(f"{axis} {index}" for axis, index in made.coordinates(rank).items())
        picture.text(x + cell / 2, y + 44, where, colour=GREY, anchor="middle", size=12)
    says = {
        "tp": "tp: other shards of the same parameters, same samples",
        "dp": "dp: other samples; gradients are averaged",
        "pp": "pp: other layers; activations are sent on (drawn for tp 0)",
    }
    for number, (axis, text) in enumerate(says.items()):
        y = 330 + number * 24
        picture.path(f"M48 {y - 4} H92", AXES[axis], weight=2.5, start=axis != "pp", end=True)
        picture.text(104, y, text)
        groups = " ".join("{" + " ".join(map(str, group)) + "}" for group in made.groups(axis))
        picture.text(500, y, f"groups {groups}", colour=GREY, mono=True, size=12.5)
    return picture


# ---- Plan ------------------------------------------------------------------------------------------------------------
def plan() -> Picture:
    made = eight_ranks()
    picture = Picture(838, 366, "A plan: made from plugins and the number of ranks, alike on every rank")
    picture.text(24, 32, "A plan: from plugins and a number of ranks, before a model is touched", size=16, bold=True)
    picture.box(24, 56, 214, 176, fill=PALE)
    picture.text(40, 80, "you give", bold=True)
    given = [
        "Zero1Plugin()",
        "SequenceParallelPlugin()",
        "ModelParallelismPlugin(",
        "    tensor_parallel_size=2,",
        "    pipeline_parallel_size=2)",
    ]
    picture.lines(40, 106, given, mono=True, size=11)
    picture.text(40, 196, "in any order, and", colour=GREY)
    picture.text(40, 216, f"{made.mesh.world_size} ranks", bold=True)
    picture.path("M242 144 H274", GREY, end=True, weight=2)
    picture.box(278, 56, 536, 262, fill="#fbfcfe")
    picture.text(294, 80, "the plan", bold=True)
    picture.text(294, 106, "mesh", colour=GREY)
    x = 378
    for axis in made.mesh.axes:
        colour = AXES[axis.name]
        picture.box(x, 90, 62, 24, fill=TINTS[colour], line=colour)
        picture.centred(x, 90, 62, 24, [f"{axis.name} {axis.degree}"], size=12.5)
        x += 72
    picture.text(294, 146, "order", colour=GREY)
    x, y = 378, 130
    for number, plugin in enumerate(made.plugins, 1):
        width = 30 + 7.0 * len(plugin.spec.name)
        if x + width > 800:
            x, y = 378, y + 32
        picture.box(x, y, width, 24, line=BLUE, fill=TINTS[BLUE])
        picture.centred(x, y, width, 24, [f"{number} {plugin.spec.name}"], size=12.5)
        x += width + 10
    picture.text(294, 212, "owners", colour=GREY)
    for number, (claim, owner) in enumerate(made.owners.items()):
        left, top = 378 + number % 2 * 214, 196 + number // 2 * 42
        picture.text(left, top + 12, claim.value.replace("_", " "), size=12.5)
        picture.text(left, top + 28, owner, colour=BLUE, size=12.5, bold=True)
    picture.text(294, 302, "compared", colour=GREY)
    picture.text(378, 302, "between ranks: a rank with another configuration is an error, not a hang", size=12.5)
    picture.text(
        24,
        346,
        "print(accelerator.plan.explain()) prints it, with the reason for each place and each owner.",
        colour=GREY,
    )
    return picture


# ---- Layout ----------------------------------------------------------------------------------------------------------
def layouts() -> list[tuple[str, str, Layout, tuple[str, ...]]]:
    """Title, what it is for, and a small layout of each kind."""
    rows, columns = 8, 6

    def of(*, rows: int = rows, code: tuple[str, ...], **cut) -> tuple[Layout, tuple[str, ...]]:
        cuts = (Cut(axis="tp", degree=2, **cut),) if cut else ()
        return Layout(shape=(rows, columns), dtype="float32", cuts=cuts), code

    fused = ("Cut(dim=0, axis='tp',", "    blocks=(4, 2, 2))")
    padded = ("Cut(dim=0, axis='tp',", "    padded=True)")
    return [
        ("Replicate", "norms", *of(code=("one Layout, no Cut",))),
        ("Shard(0) over tp", "query, key, value, up", *of(dim=0, size=rows, code=("Cut(dim=0, axis='tp')",))),
        ("Shard(1) over tp", "attention's output, down", *of(dim=1, size=columns, code=("Cut(dim=1, axis='tp')",))),
        ("fused weights", "q, k, v in one", *of(dim=0, size=8, blocks=(4, 2, 2), code=fused)),
        ("padded", "a vocabulary of 7", *of(rows=7, dim=0, size=7, padded=True, code=padded)),
    ]


def layout() -> Picture:
    picture = Picture(900, 376, "Layouts: which elements of a weight each of two tensor-parallel ranks holds")
    picture.text(24, 32, "A layout: which elements of a parameter a rank holds", size=16, bold=True)
    cell, mesh = 20, Mesh.build([AxisSpec(name="tp", degree=2, kind=AxisKind.MODEL)], 2)
    for number, (title, used, made, code) in enumerate(layouts()):
        left, top = 24 + number * 175, 98
        picture.text(left, 68, title, bold=True)
        picture.text(left, 86, used, colour=GREY, size=12)
        rows, columns = made.shape
        held = [[[] for _ in range(columns)] for _ in range(rows)]
        for rank in range(mesh.world_size):
            for piece in made.pieces(mesh.coordinates(rank)):
                for row in range(rows)[piece.global_slices[0]]:
                    for column in range(columns)[piece.global_slices[1]]:
                        held[row][column].append(rank)
        for row in range(rows):
            for column in range(columns):
                x, y = left + column * cell, top + row * cell
                (rank, *others) = held[row][column]
                picture.box(x, y, cell, cell, fill=TINTS[GREY] if others else TINTS[RANKS[rank]], line=PAPER, r=0)
        if made.padded:
            for column in range(columns):
                picture.box(
                    left + column * cell, top + rows * cell, cell, cell, line=LINE, r=0, dashed=True, weight=0.7
                )
        for cut in made.cuts:
            edge = 0
            for block in cut.blocks[:-1]:
                edge += block
                picture.path(f"M{left - 6} {top + edge * cell} H{left + columns * cell + 6}", INK, weight=1.5)
        rank_shape = " x ".join(map(str, made.local_shape))
        picture.text(left, top + 182, f"{rows} x {columns}, of which", size=12)
        picture.text(left, top + 198, f"a rank holds {rank_shape}", size=12)
        picture.lines(left, top + 222, code, mono=True, size=11, step=15, colour=GREY)
    x = 24
    for colour, text in (
        (TINTS[RANKS[0]], "tp 0"),
        (TINTS[RANKS[1]], "tp 1"),
        (TINTS[GREY], "both"),
        (PAPER, "padding, in the shard only"),
    ):
        picture.box(x, 348, 14, 14, fill=colour, line=LINE, r=2, dashed=colour == PAPER)
        picture.text(x + 20, 360, text, size=12.5)
        x += 44 + 7 * len(text)
    return picture


# ---- Phases ----------------------------------------------------------------------------------------------------------
def built_in() -> dict[Phase, list[str]]:
    """Names of the plugins of this distribution, by phase."""
    found: dict[Phase, list[str]] = {phase: [] for phase in Phase}
    config = configparser.ConfigParser()
    config.read(Path(__file__).parents[2] / "setup.cfg")
    entries = config["options.entry_points"]["neuron_accel.plugins"].strip().splitlines()
    for entry in entries:
        cls = default_registry().get(entry.partition("=")[0].strip())
        if cls is not ModelParallelismPlugin:  # which two others stand for in a plan
            found[cls.spec.phase].append(cls.spec.name)
    return found


def phases() -> Picture:
    does = {
        Phase.ADAPTATION: "what is trained",
        Phase.LAYOUT: "shards of parameters",
        Phase.ACTIVATIONS: "shards of activations",
        Phase.STAGES: "layers of a rank",
        Phase.MEMORY: "recomputation",
        Phase.PRECISION: "dtypes",
        Phase.GRADIENTS: "sums over ranks",
        Phase.OPTIMIZER: "shards of the optimizer",
    }
    picture = Picture(940, 366, "Phases: when plugins act on a model, from left to right")
    picture.text(24, 32, "Phases: in which order plugins act on a model", size=16, bold=True)
    names, width, x = built_in(), 104, 24
    for phase in Phase:
        picture.box(x, 60, width - 8, 60, fill=TINTS[BLUE], line=BLUE)
        picture.centred(x, 60, width - 8, 60, [phase.name.lower(), str(phase.value)], bold=True, size=12.5)
        picture.text(x + width / 2 - 4, 138, does[phase], size=10, colour=GREY, anchor="middle")
        for number, name in enumerate(names[phase]):
            first, _, rest = name.partition("_")
            rows = [f"{first}_", rest] if len(name) > 17 else [name]
            y = 152 + number * 34
            picture.box(x, y, width - 8, 28)
            picture.centred(x, y, width - 8, 28, rows, size=10.5, step=11)
        x += width
        if phase is Phase.PRECISION:
            picture.path(f"M{x + 12} 56 V344", GREY, dashed=True)
            picture.lines(x + 12, 46, ["to the device"], anchor="middle", colour=GREY, size=11.5)
            x += 32
    return picture


# ---- Owners ----------------------------------------------------------------------------------------------------------
def owners() -> Picture:
    pipeline = PipelineParallelPlugin(pipeline_parallel_size=2)
    runs = {
        "no plugins": plan_of([], 4),
        "tensor parallel": plan_of([TensorParallelPlugin(tensor_parallel_size=2)], 4),
        "ZeRO-1": plan_of([Zero1Plugin()], 4),
        "pipeline, ZeRO-1": plan_of([pipeline, Zero1Plugin()], 4),
        "fully sharded": plan_of([FullyShardedPlugin()], 4),
    }
    colours = {"data_parallel": ORANGE, "zero1": GREEN, "pipeline_parallel": PURPLE, "fully_sharded": TEAL}
    picture = Picture(906, 280, "Owners: which plugin performs each responsibility, in five compositions")
    picture.text(24, 32, "Owners: one plugin for each responsibility", size=16, bold=True)
    for column, name in enumerate(runs):
        picture.text(180 + column * 142 + 65, 66, name, bold=True, anchor="middle")
    for row, claim in enumerate(Claim):
        y = 80 + row * 40
        picture.text(24, y + 22, claim.value.replace("_", " "))
        for column, made in enumerate(runs.values()):
            owner = made.owners.get(claim)
            colour = colours[owner] if owner else LINE
            picture.box(
                180 + column * 142, y, 130, 32, fill=TINTS[colour] if owner else PAPER, line=colour, dashed=not owner
            )
            torch = "autograd" if claim is Claim.BACKWARD else "torch, as it is"
            picture.centred(180 + column * 142, y, 130, 32, [owner or torch], size=12, colour=INK if owner else GREY)
    picture.text(
        24, 262, "Two plugins that claim the same responsibility are refused when the plan is made.", colour=GREY
    )
    return picture


# ---- A step ----------------------------------------------------------------------------------------------------------
def step() -> Picture:
    made = plan_of([TensorParallelPlugin(tensor_parallel_size=2), SequenceParallelPlugin(), Zero1Plugin()], 4).mesh
    picture = Picture(1140, 438, "One optimizer step on four ranks: tensor parallel 2, data parallel 2, ZeRO-1")
    picture.text(
        20,
        32,
        "One optimizer step on four ranks: tensor parallel 2, data parallel 2, sequence parallel, ZeRO-1",
        size=16,
        bold=True,
    )
    columns = [
        ("loader", BLUE, None, ()),
        ("forward", GREEN, ("half of each", "layer"), ("tp",)),
        ("backward", GREEN, ("gradients of", "its half"), ("tp",)),
        ("reduce-scatter", ORANGE, ("mean of a quarter", "of the gradients"), ("dp",)),
        ("norm, clip", RED, ("one number, equal", "on all ranks"), ("tp", "dp")),
        ("update", TEAL, ("AdamW on", "a quarter"), ()),
        ("all-gather", ORANGE, ("new weights", "of its half"), ("dp",)),
    ]
    wide, high, gap, left, top = 114, 48, 30, 106, 78
    for rank in range(made.world_size):
        y = top + rank * 70
        c = made.coordinates(rank)
        picture.text(20, y + 20, f"rank {rank}", bold=True)
        picture.text(20, y + 38, f"dp {c['dp']}, tp {c['tp']}", colour=GREY, size=12)
        picture.path(f"M{left - 12} {y + high / 2} H{left + 7 * (wide + gap) + 8}", LINE, end=True)
    for number, (title, colour, says, axes) in enumerate(columns):
        x = left + number * (wide + gap)
        picture.text(x + wide / 2, 62, title, bold=True, anchor="middle")
        for rank in range(made.world_size):
            y, texts = top + rank * 70, says
            if texts is None:
                texts = (f"batch {'AB'[made.coordinates(rank)['dp']]}",)
            picture.box(x, y, wide, high, fill=TINTS[colour], line=colour)
            picture.centred(x, y, wide, high, texts, size=12, step=15)
        for axis in axes:
            for group in made.groups(axis):
                (first, last), offset = group, 0.0
                if axis == "tp":
                    middle = x + wide / 2
                    picture.path(
                        f"M{middle} {top + first * 70 + high + 1} V{top + last * 70 - 1}",
                        AXES[axis],
                        weight=2.5,
                        start=True,
                        end=True,
                    )
                else:
                    # Beside the blocks, one group on each side, and back into them.
                    y0, y1 = top + first * 70 + high / 2, top + last * 70 + high / 2
                    edge, offset = (x - 1, -9) if group == made.groups(axis)[0] else (x + wide + 1, 9)
                    picture.path(f"M{edge + offset} {y0 + 14} V{y1 - 14}", PAPER, weight=5)
                    picture.path(
                        f"M{edge} {y0 + 14} H{edge + offset} V{y1 - 14} H{edge}",
                        AXES[axis],
                        weight=2,
                        start=True,
                        end=True,
                    )
    y = 378
    picture.path(f"M{left} {y - 4} H{left + 40}", AXES["tp"], weight=2.5, start=True, end=True)
    picture.text(
        left + 52,
        y,
        "between the ranks of tp: all-gather into each attention and MLP, reduce-scatter out of it; backward: reversed",
    )
    picture.path(f"M{left} {y + 18} H{left + 40}", AXES["dp"], weight=2, start=True, end=True)
    picture.text(
        left + 52,
        y + 22,
        "between the ranks of dp: gradients in buckets, while backward still runs; and the weights back",
    )
    picture.text(
        left + 52,
        y + 44,
        "A rank holds half of the weights (tp), and the optimizer's state of a quarter of them (tp x dp).",
        colour=GREY,
    )
    return picture


# ---- What it is, in one picture --------------------------------------------------------------------------------------
def overview() -> Picture:
    made = plan_of([TensorParallelPlugin(tensor_parallel_size=2), SequenceParallelPlugin(), Zero1Plugin()], 4)
    picture = Picture(
        1000, 400, "Your loop and plugins become ranks that each hold shards of the model and the optimizer"
    )
    picture.text(24, 34, "Your loop", size=16, bold=True)
    loop = [
        "for batch in loader:",
        "    loss = model(**batch).loss",
        "    accelerator.backward(loss)",
        "    optimizer.step()",
        "    optimizer.zero_grad()",
    ]
    picture.box(24, 50, 262, 124, fill=PALE)
    picture.lines(38, 76, loop, mono=True, size=12, step=21)
    picture.text(24, 212, "Plugins", size=16, bold=True)
    named = {
        "tensor_parallel": "Tensor parallel, degree 2",
        "sequence_parallel": "Sequence parallel",
        "zero1": "ZeRO-1",
    }
    colours = {"tensor_parallel": GREEN, "sequence_parallel": GREEN, "zero1": ORANGE}
    for number, plugin in enumerate(made.plugins):
        name = plugin.spec.name
        picture.box(24, 228 + number * 38, 262, 30, fill=TINTS[colours[name]], line=colours[name])
        picture.centred(24, 228 + number * 38, 262, 30, [named[name]])
    picture.text(24, 364, "or your own: a frozen dataclass with hooks", colour=GREY)
    picture.path("M304 190 H384", INK, weight=3, end=True)
    picture.text(344, 176, "prepare", bold=True, anchor="middle")
    picture.lines(344, 214, ["on CPU ranks", "or Trainium"], anchor="middle", size=12, colour=GREY)
    picture.text(404, 34, f"{made.mesh.world_size} ranks: {made.mesh}", size=16, bold=True)
    weight = Layout(shape=(8, 8), dtype="float32", cuts=(Cut(dim=0, axis="tp", degree=2, size=8),))
    wide, high, cell = 262, 140, 7
    for rank in range(made.mesh.world_size):
        c = made.mesh.coordinates(rank)
        x, y = 404 + c["tp"] * 310, 50 + c["dp"] * 176
        picture.box(x, y, wide, high)
        picture.text(x + 14, y + 24, f"rank {rank}", bold=True)
        picture.text(x + 78, y + 24, f"dp {c['dp']}, tp {c['tp']}", colour=GREY, size=12)
        batch = "AB"[c["dp"]]
        picture.box(x + 14, y + 44, 44, 56, fill=TINTS[BLUE], line=BLUE, r=3)
        picture.centred(x + 14, y + 44, 44, 56, [batch], size=20, bold=True)
        picture.text(x + 36, y + 122, f"batch {batch}", size=11.5, colour=GREY, anchor="middle")
        (piece,) = weight.pieces(c)
        rows = range(8)[piece.global_slices[0]]
        replicas = made.mesh.size(made.mesh.gradient_axes)
        first = len(rows) // replicas * made.mesh.position(rank, made.mesh.gradient_axes)
        owned = rows[first : first + len(rows) // replicas]
        for left, colour, held, label in (
            (x + 88, GREEN, rows, "weights: 1/2"),
            (x + 176, ORANGE, owned, "optimizer: 1/4"),
        ):
            picture.box(left, y + 44, 8 * cell, 8 * cell, fill="#e6eaef", line=PAPER, r=0)
            picture.box(left, y + 44 + held.start * cell, 8 * cell, len(held) * cell, fill=colour, line=PAPER, r=0)
            grid = [f"M{left} {y + 44 + line * cell} h{8 * cell}" for line in range(9)]
            grid += [f"M{left + line * cell} {y + 44} v{8 * cell}" for line in range(9)]
            picture.path(" ".join(grid), PAPER, weight=0.9)
            picture.text(left + 28, y + 122, label, size=11.5, colour=GREY, anchor="middle")
    for group in made.mesh.groups("tp"):
        y = 50 + made.mesh.coordinates(group[0])["dp"] * 176 + high / 2
        picture.path(f"M{404 + wide + 3} {y} H{404 + 307}", AXES["tp"], weight=3, start=True, end=True)
    for group in made.mesh.groups("dp"):
        x = 404 + made.mesh.coordinates(group[0])["tp"] * 310 + wide / 2
        picture.path(f"M{x} {50 + high + 3} V{50 + 173}", AXES["dp"], weight=3, start=True, end=True)
    picture.text(404 + wide + 24, 108, "tp", bold=True, colour=AXES["tp"], anchor="middle")
    picture.text(404 + wide / 2 + 20, 213, "dp", bold=True, colour=AXES["dp"], anchor="middle")
    picture.text(404, 386, "Losses, gradients and weights are those of one process, up to rounding.", colour=GREY)
    return picture
