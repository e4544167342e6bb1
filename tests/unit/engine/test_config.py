"""Configurations: what is accepted, what it becomes, and the error of each mistake."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import math
import os
import pickle
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Optional, Union

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neuron_accel import ModelParallelismPlugin, Zero1Plugin
from neuron_accel.engine.plan.config import RunConfig, load_config, to_config
from neuron_accel.engine.plan.plugin import Phase, PluginSpec, StrategyPlugin
from neuron_accel.engine.plan.registry import Registry
from neuron_accel.errors import ConfigurationError, NeuronAccelError, PlanError, PluginError

if TYPE_CHECKING:
    import torch


class Mode(str, Enum):
    FAST = "fast"
    SAFE = "safe"


@dataclass(frozen=True, kw_only=True)
class Part:
    depth: int
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Typed(StrategyPlugin):
    """One option of every type that a configuration can hold."""

    spec: ClassVar[PluginSpec] = PluginSpec(name="typed", api_version=4, phase=Phase.MEMORY)
    flag: bool = False
    count: int = 1
    rate: float = 1.0
    name: str = "x"
    nothing: None = None
    choice: Literal["even", "whole", 2] = "even"
    limit: float | None = None
    either: Union[int, str] = 0  # noqa: UP007  # both spellings are in use
    maybe: Optional[bool] = None  # noqa: UP045
    dtype: torch.dtype | None = None  # torch is not imported in this module at run time
    pair: tuple[int, str] = (1, "a")
    row: tuple[float, ...] = ()
    items: list[int] = field(default_factory=list)
    many: Sequence[str] = ()
    unique: frozenset[str] = frozenset()
    table: dict[str, list[int]] = field(default_factory=dict)
    patterns: Mapping[str, str | None] | None = None
    mode: Mode = Mode.FAST
    path: Path | None = None
    part: Part | None = None
    noted: Annotated[int, "a note"] = 0
    anything: Any = None
    call: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count is {self.count}")
        if self.count > 99:
            raise PlanError("Too many.", why="ninety-nine are enough", fix="take fewer")


@dataclass(frozen=True, kw_only=True)
class Needy(StrategyPlugin):
    spec: ClassVar[PluginSpec] = PluginSpec(name="needy", api_version=4, phase=Phase.MEMORY)
    size: int
    note: str = ""


@pytest.fixture(scope="module")
def registry() -> Registry:
    registry = Registry()
    registry.register(Typed)
    registry.register(Needy)
    return registry


def refusal(source: Any, registry: Registry, kind: type[NeuronAccelError] = ConfigurationError) -> NeuronAccelError:
    with pytest.raises(kind) as caught:
        load_config(source, registry=registry)
    assert type(caught.value) is kind
    assert caught.value.where
    return caught.value


def write(folder: Path, text: str) -> Path:
    path = folder / "train.yaml"
    path.write_text(text, encoding="utf-8")
    return path


# ---- what is accepted ------------------------------------------------------------------------------------------------
def test_a_file(tmp_path, registry):
    path = write(
        tmp_path,
        """\
mixed_precision: "no"
gradient_accumulation_steps: 2
log_with: [tensorboard]
backend: torch
dataloader: {even_batches: false, data_seed: 3}
plugins:
  - needy: {size: 2}
  - typed:
""",
    )
    for source in (path, str(path), yaml.safe_load(path.read_text())):
        config = load_config(source, registry=registry)
        assert config.plugins == (Needy(size=2), Typed())
        assert config.accelerate == {
            "mixed_precision": "no",
            "gradient_accumulation_steps": 2,
            "log_with": ["tensorboard"],
        }
        assert config.dataloader == {"even_batches": False, "data_seed": 3}
        assert config.backend == "torch"


def test_only_what_is_given_is_passed_on(registry):
    assert load_config({}, registry=registry) == RunConfig()
    assert dict(load_config({"cpu": True}, registry=registry).accelerate) == {"cpu": True}
    with pytest.raises(TypeError):
        load_config({}, registry=registry).accelerate["cpu"] = True


@pytest.mark.parametrize(
    "entry", ["typed", {"typed": None}, {"typed": {}}, {f"{__name__}:Typed": {}}, f"{__name__}:Typed"]
)
def test_spellings_of_a_plugin(entry, registry):
    assert load_config({"plugins": [entry]}, registry=registry).plugins == (Typed(),)


def test_the_keys_are_those_of_accelerate(registry):
    """Every key that is not this project's own is an argument of the Accelerate class that receives it."""
    import inspect

    accelerate = pytest.importorskip("accelerate")
    from accelerate.utils import DataLoaderConfiguration

    from neuron_accel.engine.plan.config import _DataLoaderKeys, _Keys

    top = {f.name for f in dataclasses.fields(_Keys)} - {"plugins", "plan_for", "dataloader", "backend"}
    assert top <= set(inspect.signature(accelerate.Accelerator.__init__).parameters)
    below = {f.name: f.default for f in dataclasses.fields(_DataLoaderKeys)}
    assert below.items() <= {f.name: f.default for f in dataclasses.fields(DataLoaderConfiguration)}.items()


def accepted(option: str, value: Any, registry: Registry) -> Any:
    (plugin,) = load_config({"plugins": [{"typed": {option: value}}]}, registry=registry).plugins
    return getattr(plugin, option)


def test_dtypes(registry):
    import torch

    assert accepted("dtype", "bfloat16", registry) is torch.bfloat16
    assert accepted("dtype", "torch.float32", registry) is torch.float32
    assert accepted("dtype", torch.float16, registry) is torch.float16
    assert accepted("dtype", None, registry) is None


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("flag", True, True),
        ("count", 3, 3),
        ("rate", 3, 3.0),
        ("rate", 0.5, 0.5),
        ("limit", 2, 2.0),
        ("limit", None, None),
        ("nothing", None, None),
        ("choice", "whole", "whole"),
        ("choice", 2, 2),
        ("either", 1, 1),
        ("either", "one", "one"),
        ("maybe", False, False),
        ("pair", [2, "b"], (2, "b")),
        ("row", [1, 2.5], (1.0, 2.5)),
        ("items", [1, 2], [1, 2]),
        ("many", ["a", "b"], ("a", "b")),
        ("unique", ["a", "b"], frozenset("ab")),
        ("table", {"a": [1]}, {"a": [1]}),
        ("patterns", {"a": None, "b": "c"}, {"a": None, "b": "c"}),
        ("mode", "safe", Mode.SAFE),
        ("path", "a/b", Path("a/b")),
        ("part", {"depth": 2}, Part(depth=2)),
        ("noted", 4, 4),
        ("anything", {"a": [None]}, {"a": [None]}),
        ("call", None, None),
    ],
)
def test_values_become_what_annotations_ask_for(option, value, expected, registry):
    got = accepted(option, value, registry)
    assert got == expected
    assert type(got) is type(expected)


# ---- what is refused -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("flag", 1, "'flag' must be true or false, not 1."),
        ("flag", None, "'flag' must be true or false, not null."),
        ("count", True, "'count' must be an integer, not true."),
        ("count", 1.0, "'count' must be an integer, not 1.0."),
        ("rate", False, "'rate' must be a number, not false."),
        ("rate", 10**400, "'rate' is too large"),
        ("name", 3, "'name' must be text, not 3."),
        ("nothing", 0, "'nothing' must be null, not 0."),
        ("choice", "evn", "'choice' must be one of 'even', 'whole', 2, not 'evn'."),
        ("choice", 2.0, "'choice' must be one of 'even', 'whole', 2, not 2.0."),
        ("limit", "x", "'limit' must be a number or null, not 'x'."),
        ("either", 1.5, "'either' must be an integer or text, not 1.5."),
        ("maybe", 0, "'maybe' must be true or false or null, not 0."),
        ("dtype", 32, "'dtype' must be the name of a dtype or null, not 32."),
        ("dtype", "nn", "'dtype' must be the name of a dtype or null, not 'nn'."),
        ("pair", [1], "'pair' must be a list of 2, not of 1."),
        ("pair", [1, 2], "'pair[1]' must be text, not 2."),
        ("row", 1.0, "'row' must be a list, not 1.0."),
        ("row", "12", "'row' must be a list, not '12'."),
        ("items", [1, None], "'items[1]' must be an integer, not null."),
        ("table", [], "'table' must be a mapping, not a list."),
        ("table", {"a": 1}, "'a' must be a list, not 1."),
        ("table", {3: []}, "must be text, not 3."),
        ("patterns", {"a": 1}, "'a' must be text or null, not 1."),
        ("mode", "faster", "'mode' must be one of 'fast', 'safe', not 'faster'."),
        ("path", 1, "'path' must be a path or null, not 1."),
        ("part", 1, "'part' must be a mapping or null, not 1."),
        ("part", {"depth": "a"}, "'depth' must be an integer, not 'a'."),
        ("part", {"dept": 1}, "'dept' is not an option of 'part'."),
        ("part", {}, "needs a value for 'depth'"),
    ],
)
def test_wrong_values(option, value, message, registry):
    error = refusal({"plugins": [{"typed": {option: value}}]}, registry)
    assert message in error.what
    assert error.where.startswith("the configuration given in Python, plugins[0].typed")
    assert option in error.where


def test_what_has_no_written_form(registry):
    error = refusal({"plugins": [{"typed": {"call": "print"}}]}, registry)
    assert "'call'" in error.what
    assert "Callable" in error.why + error.what
    assert "in Python" in error.fix


@pytest.mark.parametrize(
    ("text", "what", "where", "fix"),
    [
        ("mixed_precision: no", "not false", "line 1, mixed_precision", 'put it in quotes, "no"'),
        (
            "cpu: true\nmixd_precision: 'no'",
            "'mixd_precision' is not an option",
            "line 2",
            "Did you mean 'mixed_precision'?",
        ),
        ("mixed_precision: fp61", "not 'fp61'", "line 1, mixed_precision", "Did you mean 'fp16'?"),
        ("gradient_accumulation_steps: 0", "is 0", "line 1, gradient_accumulation_steps", "at least 1"),
        ("dataloader: {even_batch: true}", "'even_batch' is not an option", "dataloader.even_batch", "'even_batches'?"),
        ("dataloader:", "must be a mapping, not null", "line 1, dataloader", None),
        (
            "plugins:\n- needy: {size: 1}\n- typed:\n    rat: 1",
            "'rat' is not an option of plugin 'typed'",
            "line 4, plugins[1].typed.rat",
            "Did you mean 'rate'?",
        ),
        (
            "plugins:\n- typed: {rate: 1e-5}",
            "not '1e-5'",
            "line 2, plugins[0].typed.rate",
            "write 1.0e-5 without quotes",
        ),
        ("plugins:\n- typed: {rate: 1.5e5}", "not '1.5e5'", "plugins[0].typed.rate", "write 1.5e+5 without quotes"),
        ("plugins:\n- typed: {rate: inf}", "not 'inf'", "plugins[0].typed.rate", ".inf"),
        ("plugins:\n- typed: {count: '4'}", "not '4'", "plugins[0].typed.count", "leave the quotes out"),
        ("plugins:\n- typed: {flag: 'true'}", "not 'true'", "plugins[0].typed.flag", "leave the quotes out"),
        ("plugins:\n- typed: {name: yes}", "not true", "plugins[0].typed.name", "put it in quotes"),
        ("plugins:\n- typed: {dtype: flaot32}", "not 'flaot32'", "plugins[0].typed.dtype", "Did you mean 'float32'?"),
        (
            "plugins:\n- typed: 3",
            "Options of plugin 'typed' must be a mapping, not 3",
            "line 2, plugins[0].typed",
            "{name",
        ),
        (
            "plugins:\n  typed: {}",
            "'plugins' must be a list, not a mapping",
            "line 1, plugins",
            "begin each plugin with a dash",
        ),
        ("plugins: typed", "'plugins' must be a list, not 'typed'", "line 1, plugins", None),
        ("plugins:\n- typed:\n  count: 3", "has the keys 'typed', 'count'", "line 2, plugins[0]", "indent its options"),
        ("plugins:\n- 3", "3 is not a plugin", "line 2, plugins[0]", "write 'name'"),
        ("plugins:\n- {}", "{} is not a plugin", "line 2, plugins[0]", "write 'name'"),
        ("plugins:\n- needy", "Plugin 'needy' needs a value for 'size'", "line 2, plugins[0].needy", "add 'size: ...'"),
        ("- typed", "must be a mapping of keys to values", "train.yaml", "write 'plugins:'"),
        ("", "is empty", "train.yaml", "plugins: []"),
        ("cpu: [", "not valid YAML", "line 1, column 7", None),
        ("cpu: true\ncpu: false", "Key 'cpu' is given twice, in lines 1 and 2", "train.yaml", "keep one"),
        ("a: &a\n  b: *a", "contains itself", "a.b", None),
        ("cpu: true\n---\ncpu: false", "not valid YAML", "line 2", None),
    ],
)
def test_mistakes_in_a_file(text, what, where, fix, tmp_path, registry):
    error = refusal(write(tmp_path, text), registry)
    assert what in error.what
    assert str(tmp_path / "train.yaml") in error.where
    assert where in error.where
    if fix:
        assert fix in error.fix


def test_a_merge_key_is_no_duplicate(tmp_path, registry):
    text = "x: &x {count: 2}\nplugins:\n- typed: {<<: *x, rate: 2.0}"
    assert "'x' is not an option" in refusal(write(tmp_path, text), registry).what
    text = "plugins:\n- typed: {part: &x {depth: 2}, table: &y {a: []}, anything: {<<: *x, <<: *y, more: 1}}"
    (plugin,) = load_config(write(tmp_path, text), registry=registry).plugins
    assert plugin.anything == {"depth": 2, "a": [], "more": 1}


def test_an_unknown_plugin(tmp_path, registry):
    error = refusal(write(tmp_path, "plugins:\n- typd: {}"), registry, PluginError)
    assert "no plugin 'typd'" in error.what
    assert "train.yaml, line 2, plugins[0].typd" in error.where
    assert "Did you mean 'typed'?" in error.fix


def test_a_plugin_that_refuses_its_options(tmp_path, registry):
    error = refusal(write(tmp_path, "plugins:\n- typed:\n    count: 0"), registry)
    assert error.what == "Plugin 'typed' does not accept these options."
    assert "train.yaml, line 2, plugins[0].typed" in error.where
    assert error.why == "count is 0"
    assert isinstance(error.__cause__, ValueError)
    error = refusal(write(tmp_path, "plugins:\n- typed: {count: 100}"), registry)
    assert (error.what, error.why, error.fix) == ("Too many.", "ninety-nine are enough", "take fewer")
    assert "plugins[0].typed" in error.where
    assert isinstance(error.__cause__, PlanError)


def test_a_plugin_object_is_no_part_of_a_configuration(registry):
    error = refusal({"plugins": [Typed()]}, registry)
    assert error.where.endswith("plugins[0]")
    assert "'plugins'" in error.fix


def test_files_that_cannot_be_read(tmp_path, registry):
    error = refusal(tmp_path / "missing.yaml", registry)
    assert error.where == str(tmp_path / "missing.yaml")
    assert error.why == os.strerror(2)
    assert refusal(tmp_path, registry).why
    (tmp_path / "latin.yaml").write_bytes(b"cpu: \xff")
    assert "utf-8" in refusal(tmp_path / "latin.yaml", registry).why
    assert "not 3" in refusal(3, registry).what


def test_an_annotation_that_does_not_exist(registry):
    @dataclass(frozen=True, kw_only=True)
    class Vague(StrategyPlugin):
        spec: ClassVar[PluginSpec] = PluginSpec(name="vague", api_version=4, phase=Phase.MEMORY)
        what: Missing = None  # noqa: F821

    own = Registry()
    own.register(Vague)
    error = refusal({"plugins": [{"vague": {"what": 1}}]}, own, PluginError)
    assert "'Missing' of option 'what' is not known at run time" in error.what
    assert "TYPE_CHECKING" in error.fix


# ---- what nobody means to write --------------------------------------------------------------------------------------
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(9))
HOSTILE = {
    "a NUL byte": ("cpu: true\0", "not valid YAML"),
    "a mapping as key": ("{a: b}: 1", "cannot be a key"),
    "a list as key": ("plugins:\n- ? [a, b]\n  : 1", "cannot be a key"),
    "a number of 5,000 digits": ("gradient_accumulation_steps: " + "7" * 5000, "cannot be read"),
    "a key of 5,000 digits": ("? " + "7" * 5000 + "\n: 1", "cannot be read"),
    "a date that does not exist": ("project_dir: 2001-99-99", "cannot be read"),
    "3,000 levels of blocks": ("\n".join(" " * i + "a:" for i in range(700)), "nested in more than"),
    "20,000 brackets": ("[" * 20_000, "nested in more than"),
    "20,000 closed brackets": ("plugins: " + "[" * 20_000 + "]" * 20_000, "nested in more than"),
    "20,000 braces": ("{" * 20_000, "nested in more than"),
    "3,000 dashes": ("- " * 3000 + "a", "nested in more than"),
    "an alias bomb": (BOMB, "has more than"),
    "a bomb of merge keys": (BOMB + "plugins: [{<<: *a9}]", "has more than"),
    "an unknown alias": ("a: *b", "not valid YAML"),
    "an unknown tag": ("a: !!python/object/apply:os.system [x]", "not valid YAML"),
    "too much": ("# " + "x" * 300_000, "cannot be read"),
    "many values": ("plugins: [" + "a, " * 12_000 + "]", "has more than"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_in_little_memory(name, tmp_path, registry):
    text, message = HOSTILE[name]
    path = write(tmp_path, text)
    tracemalloc.start()
    try:
        error = refusal(path, registry)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert message in error.what
    assert str(path) in error.where
    assert peak < 50e6


def test_what_is_no_file_does_not_block(tmp_path, registry):
    os.mkfifo(tmp_path / "pipe")
    assert "pipe" in refusal(tmp_path / "pipe", registry).why
    assert "device" in refusal("/dev/zero", registry).why
    assert refusal("a\0b", registry).why


@given(text=st.text(max_size=60) | st.lists(st.sampled_from(list("[]{}:,&*a-?!|>'\"#\n 1<")), max_size=40).map("".join))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_is_read_or_refused_in_words(text, tmp_path, registry):
    path = tmp_path / "any.yaml"
    path.write_bytes(text.encode("utf-8", "replace"))
    with contextlib.suppress(NeuronAccelError):
        load_config(path, registry=registry)


# ---- objects are as strict as files ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"flag": 1}, "'flag' must be True or False, not 1."),
        ({"count": "4"}, "'count' must be an integer, not '4'."),
        ({"count": True}, "'count' must be an integer, not True."),
        ({"count": 2.0}, "'count' must be an integer, not 2.0."),
        ({"rate": "a"}, "'rate' must be a number, not 'a'."),
        ({"rate": math.nan}, "'rate' must be finite, not nan."),
        ({"limit": -math.inf}, "'limit' must be finite, not -inf."),
        ({"row": (1.0, math.inf)}, "'row' must be finite, not (1.0, inf)."),
        ({"row": ("a",)}, "'row' must be a list (a number), not ('a',)."),
        ({"pair": (1,)}, "'pair' must be a list"),
        ({"name": 3}, "'name' must be text, not 3."),
        ({"choice": "evn"}, "'choice' must be one of 'even', 'whole', 2, not 'evn'."),
        ({"dtype": "float32"}, "'dtype' must be a torch.dtype or None, not 'float32'."),
        ({"mode": "fast"}, "'mode' must be a Mode, not 'fast'."),
        ({"part": {"depth": 1}}, "'part' must be a Part or None, not {'depth': 1}."),
        ({"path": "a"}, "'path' must be a path or None, not 'a'."),
        ({"table": {"a": [1, "b"]}}, "'table' must be a mapping"),
        ({"unique": ["a"]}, "'unique' must be a set (text), not ['a']."),
        ({"call": 3}, "'call' must be"),
        ({"noted": None}, "'noted' must be an integer, not None."),
    ],
)
def test_objects_are_as_strict_as_files(options, what):
    with pytest.raises(ConfigurationError) as caught:
        Typed(**options)
    assert caught.value.what.startswith(what)
    assert caught.value.where == f"Typed, {next(iter(options))}"
    with pytest.raises(ConfigurationError):
        replace(Typed(), **options)


def test_objects_take_what_python_has_for_the_types():
    import torch

    class Whole(int):
        pass

    made = Typed(rate=1, count=Whole(3), row=[1, 2.0], many=["a"], dtype=torch.float32, call=print, anything=math.nan)
    assert made.row == [1, 2.0]


def test_a_file_may_not_name_infinity_either(tmp_path, registry):
    error = refusal(write(tmp_path, "plugins:\n- typed: {rate: .inf}"), registry)
    assert "'rate' must be finite" in error.what
    assert "line 2, plugins[0].typed" in error.where


def test_a_field_may_ask_for_infinity_and_a_class_may_convert():
    @dataclass(frozen=True, kw_only=True)
    class Tolerant(StrategyPlugin):
        spec: ClassVar[PluginSpec] = PluginSpec(name="tolerant", api_version=4, phase=Phase.MEMORY)
        order: float = field(default=2.0, metadata={"finite": False})
        names: tuple[str, ...] = ()
        unknown: Missing = None  # noqa: F821

        def __post_init__(self) -> None:
            names = self.names.split(",") if isinstance(self.names, str) else self.names
            object.__setattr__(self, "names", tuple(names))

    class Derived(Tolerant):
        """A subclass defines the annotation of an inherited option."""

        def __post_init__(self) -> None:
            super().__post_init__()
            if isinstance(self.order, str):
                object.__setattr__(self, "order", float(self.order))

    assert Tolerant(order=math.inf, names="a,b", unknown=object()).names == ("a", "b")
    assert Derived(order="inf").order == math.inf
    with pytest.raises(ConfigurationError, match="'order' must be a number"):
        Derived(order=None)
    assert copy.deepcopy(pickle.loads(pickle.dumps(Typed(rate=2.0)))) == Typed(rate=2.0)


def test_an_error_of_a_class_that_met_a_wrong_type_names_the_option():
    from neuron_accel import ModelParallelismPlugin, Zero1Plugin

    with pytest.raises(ConfigurationError, match="'max_norm' must be a number or None, not 'a'"):
        Zero1Plugin(max_norm="a")
    for option in ("max_norm", "bucket_cap_mb"):
        with pytest.raises(ConfigurationError, match=f"{option!r} must be finite"):
            Zero1Plugin(**{option: math.nan})
    with pytest.raises(ConfigurationError, match="leave the quotes out: 2"):
        ModelParallelismPlugin(tensor_parallel_size="2")
    with pytest.raises(ConfigurationError, match="tensor_parallel_size is 0"):
        ModelParallelismPlugin(tensor_parallel_size=0)
    with pytest.raises(ValueError, match="count is 0"):
        Typed(count=0)


# ---- and back --------------------------------------------------------------------------------------------------------
TEXT = st.text(st.characters(codec="ascii", categories=["L", "N"]), max_size=4)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def typed(draw: st.DrawFn) -> Typed:
    import torch

    return Typed(
        flag=draw(st.booleans()),
        count=draw(st.integers(1, 99)),
        rate=draw(FLOATS),
        name=draw(TEXT),
        choice=draw(st.sampled_from(["even", "whole", 2])),
        limit=draw(st.none() | FLOATS),
        either=draw(st.integers() | TEXT),
        maybe=draw(st.none() | st.booleans()),
        dtype=draw(st.sampled_from([None, torch.float32, torch.bfloat16])),
        pair=draw(st.tuples(st.integers(), TEXT)),
        row=draw(st.lists(FLOATS, max_size=2).map(tuple)),
        items=draw(st.lists(st.integers(), max_size=2)),
        many=draw(st.lists(TEXT, max_size=2).map(tuple)),
        unique=draw(st.frozensets(TEXT, max_size=2)),
        table=draw(st.dictionaries(TEXT, st.lists(st.integers(), max_size=2), max_size=2)),
        patterns=draw(st.none() | st.dictionaries(TEXT, st.none() | TEXT, max_size=2)),
        mode=draw(st.sampled_from(Mode)),
        path=draw(st.sampled_from([None, Path("a"), Path("a/b")])),
        part=draw(st.none() | st.builds(Part, depth=st.integers(), label=TEXT)),
    )


@given(st.lists(typed(), max_size=2))
@settings(max_examples=30)
def test_to_config_is_the_inverse(plugins):
    registry = Registry()
    registry.register(Typed)
    data = to_config([*plugins, Needy(size=3)], registry=registry)
    assert load_config(data, registry=registry).plugins == (*plugins, Needy(size=3))
    again = yaml.safe_load(yaml.safe_dump(data))
    assert load_config(again, registry=registry).plugins == (*plugins, Needy(size=3))


def test_to_config_names_known_classes_by_name_and_others_by_module(registry):
    (entry,) = to_config([Needy(size=3)], registry=registry)["plugins"]
    assert entry == {"needy": {"size": 3, "note": ""}}
    (entry,) = to_config([Needy(size=3)], registry=Registry())["plugins"]
    assert list(entry) == [f"{__name__}:Needy"]


def test_to_config_refuses_what_it_cannot_write(registry):
    with pytest.raises(ConfigurationError) as caught:
        to_config([Typed(call=print)], registry=registry)
    assert "Option 'call' of plugin 'typed'" in caught.value.what
    assert caught.value.where.endswith(":Typed")
    assert caught.value.fix


def test_the_built_in_plugins_round_trip():
    registry = Registry.from_environment({})
    data = {
        "plugins": [{"model_parallelism": {"tensor_parallel_size": 2}}, "sequence_parallel", {"zero1": {"max_norm": 1}}]
    }
    plugins = load_config(data, registry=registry).plugins
    written = to_config(plugins, registry=registry)
    assert [next(iter(entry)) for entry in written["plugins"]] == ["model_parallelism", "sequence_parallel", "zero1"]
    assert written["plugins"][0]["model_parallelism"]["tensor_parallel_size"] == 2
    assert load_config(yaml.safe_load(yaml.safe_dump(written)), registry=registry).plugins == plugins


class WithoutOptions(StrategyPlugin):
    spec = PluginSpec(name="without_options", api_version=4, phase=Phase.ACTIVATIONS)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda: Zero1Plugin(max_nrom=1.0),
            r"'max_nrom' is not an option of(.|\n)*Did you mean 'max_norm'",
        ),
        (lambda: Zero1Plugin(1.0), r"no positional argument, but received 1.0(.|\n)*name it: "),
        (lambda: ModelParallelismPlugin(2, 3), r"arguments: tensor_parallel_size, but(.|\n)*pipeline_parallel_size"),
        (lambda: WithoutOptions(2), "leave it out: there are no options"),
    ],
)
def test_a_plugin_is_not_made_from_what_it_does_not_have(make, expected):
    with pytest.raises(ConfigurationError, match=expected):
        make()


def test_the_signature_of_a_plugin_is_that_of_its_options():
    of_object = ["args", "kwargs"]  # as Python gives it until 3.11.2
    assert list(inspect.signature(WithoutOptions).parameters) in ([], of_object)
    assert "max_norm" in inspect.signature(Zero1Plugin).parameters
    plugin = Zero1Plugin(max_norm=1.0)
    assert plugin == copy.deepcopy(plugin) == pickle.loads(pickle.dumps(plugin))
