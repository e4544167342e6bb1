"""The arguments of ``NeuronAccelerator``, and errors for invalid ones."""

from __future__ import annotations

import inspect

import pytest
from accelerate import Accelerator
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    PrecisionType,
)

from neuron_accel import (
    ModelParallelismPlugin,
    NeuronAccelerator,
    SequenceParallelPlugin,
    TensorParallelPlugin,
    Zero1Plugin,
)
from neuron_accel.engine.plan.config import RunConfig, load_config
from neuron_accel.engine.plan.registry import default_registry
from neuron_accel.errors import ConfigurationError
from neuron_accel.loop.arguments import (
    ACCELERATES,
    NOT_GIVEN,
    checked_plugins,
    merged_options,
    planned_training,
    timeout_of,
    with_accumulation,
    with_ddp_options,
)


def test_every_argument_of_accelerate_is_spelt_out_with_its_default_or_what_stands_for_it():
    theirs = inspect.signature(Accelerator.__init__).parameters
    ours = inspect.signature(NeuronAccelerator.__init__).parameters
    assert not [p for p in ours.values() if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    for name in ACCELERATES:
        assert ours[name].default is (None if theirs[name].default is None else NOT_GIVEN), name
    assert set(ours) - set(theirs) == {"plugins", "plan_for", "config", "zero_1", "mp_plugin", "backend"}


def test_what_was_not_given_is_not_passed_on():
    given = dict.fromkeys(ACCELERATES) | {"cpu": False, "device_placement": NOT_GIVEN}
    assert merged_options(RunConfig(), given, {}) == {"cpu": False}
    configured = load_config({"gradient_accumulation_steps": 3, "dataloader": {"even_batches": False}})
    options = merged_options(configured, {"mixed_precision": PrecisionType.BF16}, {})
    assert options.pop("dataloader_config") == DataLoaderConfiguration(even_batches=False)
    assert options == {"gradient_accumulation_steps": 3, "mixed_precision": "bf16"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"gradient_acumulation_steps": 2}, "Did you mean 'gradient_accumulation_steps'"),
        ({"plugins": Zero1Plugin()}, r"write plugins=\[Zero1Plugin\(\.\.\.\)\]"),
        ({"plugins": "zero1"}, r"config=\{'plugins': \['zero1'\]\}"),
        ({"plugins": [Zero1Plugin]}, r"got the class Zero1Plugin(.|\n)*plugins\[0\](.|\n)*write Zero1Plugin\(\)"),
        ({"plugins": ["zero1"]}, "got the string 'zero1'"),
        ({"mp_plugin": 2}, "mp_plugin"),
        ({"mixed_precision": "bf17"}, "Did you mean 'bf16'"),
        ({"mixed_precision": "fp8"}, "TransformerEngine, torchao or MS-AMP"),
        ({"gradient_accumulation_steps": "2"}, "must be an integer, not '2'"),
        ({"gradient_accumulation_steps": 0}, "at least one micro-batch"),
        ({"cpu": "yes"}, "'cpu' must be true or false"),
        ({"gradient_accumulation_steps": 1, "config": {"gradient_accumulation_steps": 2}}, "given twice"),
        ({"fsdp_plugin": FullyShardedDataParallelPlugin}, "use these plugins instead: FullyShardedPlugin"),
        ({"kwargs_handlers": InitProcessGroupKwargs()}, r"kwargs_handlers=\[InitProcessGroupKwargs"),
        ({"kwargs_handlers": [GradientAccumulationPlugin()]}, "gradient_accumulation_plugin=Gradient"),
        ({"kwargs_handlers": [3]}, "Expected a kwargs handler of Accelerate, got a int"),
        ({"kwargs_handlers": [InitProcessGroupKwargs(), InitProcessGroupKwargs()]}, "two InitProcessGroupKwargs"),
        ({"kwargs_handlers": [DistributedDataParallelKwargs(comm_hook="fp16")]}, "comm_hook='fp16' has no effect"),
    ],
)
def test_slips_are_configuration_errors_that_say_what_to_write(arguments, expected):
    with pytest.raises(ConfigurationError, match=expected):
        NeuronAccelerator(**arguments)


@pytest.mark.parametrize("loader", [None, DataLoaderConfiguration(even_batches=False)])
def test_split_batches_is_ignored_as_by_accelerate(loader):
    given = {"split_batches": True} | ({} if loader is None else {"dataloader_config": loader})
    with pytest.warns(UserWarning, match=r"is ignored.*DataLoaderConfiguration\(split_batches=True\)"):
        options = merged_options(RunConfig(), given, {})
    assert options == ({} if loader is None else {"dataloader_config": loader})
    assert merged_options(RunConfig(), {"split_batches": False}, {}) == {}


@pytest.mark.parametrize("name", ["FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"])
def test_strategies_of_accelerate_launch_are_refused_like_their_arguments(name):
    with pytest.raises(ConfigurationError, match=f"ACCELERATE_USE_{name}=true(.|\n)*use these plugins instead"):
        merged_options(RunConfig(), {}, {f"ACCELERATE_USE_{name}": "true"})
    assert merged_options(RunConfig(), {}, {f"ACCELERATE_USE_{name}": "false"}) == {}


def test_a_wrong_precision_from_a_launcher_is_refused():
    with pytest.raises(ConfigurationError, match="ACCELERATE_MIXED_PRECISION"):
        merged_options(RunConfig(), {}, {"ACCELERATE_MIXED_PRECISION": "fp61"})


@pytest.mark.parametrize(
    ("config", "environ"), [({"mixed_precision": "fp8"}, {}), ({}, {"ACCELERATE_MIXED_PRECISION": "fp8"})]
)
def test_fp8_is_refused_wherever_it_comes_from(config, environ):
    with pytest.raises(ConfigurationError, match="'fp8' is not possible") as caught:
        merged_options(load_config(config), {}, environ)
    assert caught.value.fix == "use mixed_precision='bf16'"


def test_options_of_ddp_reach_what_reduces_gradients():
    registry = default_registry()
    handler = DistributedDataParallelKwargs(bucket_cap_mb=7, broadcast_buffers=False, find_unused_parameters=True)
    (plugin,) = with_ddp_options([], [handler], registry)
    assert (plugin.spec.name, plugin.bucket_cap_mb, plugin.broadcast_buffers) == ("data_parallel", 7.0, False)
    assert with_ddp_options([], [DistributedDataParallelKwargs(find_unused_parameters=True)], registry) == []
    same = Zero1Plugin(bucket_cap_mb=7.0)
    assert with_ddp_options([same], [DistributedDataParallelKwargs(bucket_cap_mb=7)], registry) == [same]
    (plugin,) = with_ddp_options([Zero1Plugin(partition="parameters")], [handler], registry)  # as by zero_1=True
    assert (plugin.partition, plugin.bucket_cap_mb, plugin.broadcast_buffers) == ("parameters", 7.0, False)
    with pytest.raises(ConfigurationError, match=r"write Zero1Plugin\(bucket_cap_mb=7.0\)"):
        with_ddp_options([Zero1Plugin(bucket_cap_mb=8.0)], [DistributedDataParallelKwargs(bucket_cap_mb=7)], registry)


def test_the_timeout_of_a_handler_is_that_of_every_group():
    import datetime

    limit = datetime.timedelta(seconds=7)
    assert timeout_of([InitProcessGroupKwargs(timeout=limit)]) == limit
    assert timeout_of([]) is None


def test_model_parallelism_is_written_as_in_optimum_neuron():
    plugin = ModelParallelismPlugin(2, sequence_parallel_enabled=True)
    assert plugin.tensor_parallel_size == 2
    assert plugin.companions() == (TensorParallelPlugin(tensor_parallel_size=2), SequenceParallelPlugin())
    assert ModelParallelismPlugin(1, sequence_parallel_enabled=True).companions() == ()


OWN_ACCUMULATION = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True, adjust_scheduler=False)


@pytest.mark.parametrize(
    ("options", "plugin"),
    [
        ({}, GradientAccumulationPlugin(num_steps=1)),
        ({"gradient_accumulation_steps": 3}, GradientAccumulationPlugin(num_steps=3)),
        ({"gradient_accumulation_plugin": OWN_ACCUMULATION}, OWN_ACCUMULATION),
    ],
    ids=["default", "steps", "plugin"],
)
def test_an_accelerator_leaves_the_environment_alone_while_it_starts(options, plugin, monkeypatch):
    as_accelerate_reads_it = plugin.to_kwargs()

    def emptied():
        raise AssertionError("os.environ would be empty for a moment, and another rank may be a thread of this process")

    monkeypatch.setattr("accelerate.utils.environment.clear_environment", emptied)
    assert NeuronAccelerator(**options).gradient_state.plugin_kwargs == as_accelerate_reads_it


def test_accumulation_from_the_environment_and_given_twice():
    environ = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    assert with_accumulation({"gradient_accumulation_steps": 2}, environ)["gradient_accumulation_plugin"].num_steps == 4
    twice = {"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=2)}
    assert with_accumulation(twice, {}) == twice
    with pytest.raises(ValueError, match="only pass one of"):
        NeuronAccelerator(**twice)


@pytest.mark.parametrize("value", ["many", "0", "-1", ""])
def test_a_number_of_steps_in_the_environment_that_is_none_is_named(value):
    with pytest.raises(ConfigurationError, match="ACCELERATE_GRADIENT_ACCUMULATION_STEPS"):
        with_accumulation({}, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": value})


def test_a_mapping_among_plugins_is_read_as_in_a_configuration():
    given = checked_plugins([{"zero1": {"bucket_cap_mb": 3.0}}, SequenceParallelPlugin()], None)
    assert given == [Zero1Plugin(bucket_cap_mb=3.0), SequenceParallelPlugin()]
    with pytest.raises(ConfigurationError, match="bucket_cap_mb"):
        checked_plugins([{"zero1": {"bucket_cap": 3.0}}], None)
    with pytest.raises(ConfigurationError, match="names in a configuration"):
        checked_plugins(["zero1"], None)


# ---- plugins="auto" --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("plugins", "plan_for", "config", "training", "others"),
    [
        ("auto", None, None, {}, []),
        ([Zero1Plugin()], None, None, None, [Zero1Plugin()]),
        (iter([Zero1Plugin()]), None, None, None, [Zero1Plugin()]),
        (["auto", Zero1Plugin()], {"sequence": 8}, None, {"sequence": 8}, [Zero1Plugin()]),
        ((), {"model": "m"}, {"plugins": "auto", "plan_for": {"sequence": 8}}, {"model": "m", "sequence": 8}, []),
        ((), {"model": "m"}, {"plugins": ["auto", "zero1"]}, {"model": "m"}, []),
        ((), {"model": "m"}, {"plugins": ["zero1"]}, None, []),  # the file decides
    ],
)
def test_what_is_to_be_planned(plugins, plan_for, config, training, others):
    configured = load_config(config, searches=True) if config else RunConfig()
    found = planned_training(plugins, plan_for, configured, has_config=config is not None)
    assert (found[0], list(found[1])) == (training, others)


def test_a_layout_is_searched_for_an_accelerator_only():
    with pytest.raises(ConfigurationError, match="'auto' is for NeuronAccelerator only"):
        load_config({"plugins": "auto"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"plan_for": {"model": "m"}}, "no effect without"),
        (
            {"plan_for": {"sequence": 8}, "config": {"plugins": "auto", "plan_for": {"sequence": 8}}},
            "'sequence' twice, as an argument",
        ),
        ({"config": {"plugins": ["zero1"], "plan_for": {"sequence": 8}}}, "no effect without 'plugins: auto'"),
        ({"plugins": "automatic"}, "must be a list of plugins"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        NeuronAccelerator(**arguments)


def test_a_search_that_is_not_installed_is_named(monkeypatch):
    from neuron_accel.engine.plan import auto

    monkeypatch.setattr(auto, "entry_points", lambda group: ())
    monkeypatch.setattr(auto, "not_installed", lambda group: ["neuron-accel-plan"])
    with pytest.raises(ConfigurationError, match="install the package neuron-accel-plan"):
        NeuronAccelerator(plugins="auto")


def test_a_dry_run_of_a_later_rank_searches_itself(monkeypatch):
    """It receives nothing from rank 0."""
    from neuron_accel.backends.dry_run import DryRunBackend
    from neuron_accel.engine.plan import auto

    monkeypatch.setattr(auto, "_chooser", lambda: lambda training, **options: {"plugins": [training["model"]]})
    chosen = auto.choose_layout(
        {"model": "m"}, DryRunBackend(world_size=4, rank=2), None, accumulation=1, recorded=lambda: None
    )
    assert chosen == {"plugins": ["m"]}
