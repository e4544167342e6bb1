"""NEURON_CC_FLAGS: parsing, writing, errors, and merging with the flags of the user."""

from __future__ import annotations

import pytest

from neuron_accel.errors import ConfigurationError
from neuron_accel.neuron import CompileCache, CompilerOptions
from neuron_accel.neuron.environment import compile_settings
from neuron_accel.neuron.flags import parse, remarks, write


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("--model-type transformer", [("--model-type", "transformer")]),
        ("--model-type=transformer", [("--model-type", "transformer")]),
        ("--distribution-strategy llm-training", [("--distribution-strategy", "llm-training")]),
        ("--auto-cast=none", [("--auto-cast", "none")]),
        ("-O1", [("--optlevel", "1")]),
        ("-O 2", [("--optlevel", "2")]),
        ("--optlevel=3", [("--optlevel", "3")]),
        ("-lnc=2", [("--lnc", "2")]),
        ("-lnc 1", [("--lnc", "1")]),
        ("--logical-nc-config=2", [("--lnc", "2")]),
        ("--enable-mixed-precision-accumulation", [("--enable-mixed-precision-accumulation", None)]),
        ("--retry_failed_compilation", [("--retry_failed_compilation", None)]),
        ("--no_cache", [("--no_cache", None)]),
        ("--log_level=INFO", [("--log_level", "INFO")]),
        ("--cache_dir='/a b/c'", [("--cache_dir", "/a b/c")]),
        ("--cache_dir=s3://bucket/prefix", [("--cache_dir", "s3://bucket/prefix")]),
        ("--native-int64=enabled", [("--native-int64", "enabled")]),
        ("--implicit-integer-downcast=none", [("--implicit-integer-downcast", "none")]),
        ("--something-new=7 --other 8 -x", [("--something-new", "7"), ("--other", "8"), ("-x", None)]),
        ("-O1 --optlevel=1", [("--optlevel", "1")]),
        ("--native-int64=default", [("--native-int64", "default")]),
        ("--implicit-integer-downcast=dot,pow", [("--implicit-integer-downcast", "dot,pow")]),
        ("--distribution-strategy=generic", [("--distribution-strategy", "generic")]),
        ("--distribution-strategy=NEMO", [("--distribution-strategy", "NEMO")]),
        ("--verbose=35", [("--verbose", "35")]),
        ("--auto-cast=matmul", [("--auto-cast", "matmul")]),
        ("--enable-mixed-precision-accumulation=true", [("--enable-mixed-precision-accumulation", "true")]),
        ("-O1 --x=1 -O2", [("--x", "1"), ("--optlevel", "2")]),
        ("--a=1 --b --a=2", [("--b", None), ("--a", "2")]),
        (
            "--enable-mixed-precision-accumulation -O1 --disable-mixed-precision-accumulation",
            [("--optlevel", "1"), ("--disable-mixed-precision-accumulation", None)],
        ),
        (
            "--tensorizer-options=-x --tensorizer-options=-y",
            [("--tensorizer-options", "-x"), ("--tensorizer-options", "-y")],
        ),
    ],
)
def test_options_are_read_in_every_spelling_and_written_so_that_they_read_alike(text, expected):
    flags = parse(text)
    assert [(flag.name, flag.value) for flag in flags] == expected
    assert [(flag.name, flag.value) for flag in parse(write(flags))] == expected


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("--model-type='transformer", "No closing quotation", "close the quote"),
        ("transformer", "'transformer' is not an option", "--transformer"),
        ("--model-type", "--model-type has no value", "generic, transformer"),
        ("--cache_dir=", "--cache_dir= has no value", "--cache_dir=VALUE"),
        ("-O4", "'4' is not a valid value of --optlevel", "1, 2, 3"),
        ("-lnc=3", "'3' is not a valid value of --lnc", "1, 2"),
        ("--no_cache=1", "--no_cache takes no value", "write --no_cache"),
        ("--cache_size=1000", "no effect", "cache prune --max-size"),
        ("--cache_ttl=30", "no effect", "cache prune --ttl"),
    ],
)
def test_malformed_options_are_refused(text, what, fix):
    with pytest.raises(ConfigurationError, match="NEURON_CC_FLAGS") as caught:
        parse(text)
    assert what in caught.value.what
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("-O1 --auto-cast=none --verbose=35 --something-new=7", []),
        ("--enable-mixed-precision-accumulation=true", []),
        ("-O1 --optlevel=1", []),
        ("--auto-cast=bf16", ["--auto-cast=bf16: listed values are none, matmult, all"]),
        ("--model-type=mamba", ["--model-type=mamba: listed values are generic, transformer,"]),
        ("--enable-saturate-infinity=often", ["--enable-saturate-infinity is a switch"]),
        ("--retry_failed_compilaton", ["did you mean --retry_failed_compilation?"]),
        ("--distribution_strategy=llm-training", ["did you mean --distribution-strategy?"]),
        ("-O1 -O2 -O3", ["-O1 is overridden by -O3 after it", "-O2 is overridden by -O3"]),
        ("-O1 -O2 -O1", ["-O2 is overridden by -O1 after it"]),
        (
            "--enable-mixed-precision-accumulation --disable-mixed-precision-accumulation",
            ["--enable-mixed-precision-accumulation is overridden by --disable-mixed-precision-accumulation"],
        ),
    ],
)
def test_what_may_be_a_slip_is_passed_on_with_a_remark(text, said):
    found = remarks(text)
    assert len(found) == len(said)
    for words, remark in zip(said, found, strict=True):
        assert words in remark
    parse(text)


def test_a_switch_and_its_explicit_form_are_alike():
    options = CompilerOptions(enable_mixed_precision_accumulation=True)
    text = "--enable-mixed-precision-accumulation=true"
    assert options.merge({"NEURON_CC_FLAGS": text}) == text
    with pytest.raises(ConfigurationError, match="contradict"):
        options.merge({"NEURON_CC_FLAGS": "--enable-mixed-precision-accumulation=false"})


def test_options_in_code_that_may_be_a_slip_warn():
    with pytest.warns(UserWarning, match="did you mean --model-type"):
        CompilerOptions(extra=("--model_type=transformer",))


def test_options_become_flags():
    options = CompilerOptions(
        model_type="transformer",
        distribution_strategy="llm-training",
        auto_cast="matmult",
        auto_cast_type="bf16",
        optlevel=1,
        lnc=2,
        target="trn2",
        enable_mixed_precision_accumulation=True,
        enable_saturate_infinity=True,
        extra=("--tensorizer-options='--a --b'",),
    )
    assert options.merge({}) == (
        "--model-type=transformer --distribution-strategy=llm-training --auto-cast=matmult --auto-cast-type=bf16 -O1 "
        "-lnc=2 --target=trn2 --enable-mixed-precision-accumulation --enable-saturate-infinity "
        "--tensorizer-options='--a --b'"
    )
    assert CompilerOptions().merge({}) == ""
    assert CompilerOptions(enable_mixed_precision_accumulation=False).merge({}).startswith("--disable-mixed")


def test_for_training_leaves_dtypes_to_torch():
    text = CompilerOptions.for_training(mixed_precision="bf16", optlevel=1).merge({})
    assert "--auto-cast=none" in text
    assert "--enable-mixed-precision-accumulation" in text
    assert "mixed-precision" not in CompilerOptions.for_training().merge({})


@pytest.mark.parametrize(
    "wrong",
    [
        {"model_type": "transfomer"},
        {"optlevel": 4},
        {"optlevel": "1"},
        {"optlevel": True},
        {"lnc": 0},
        {"auto_cast": True},
        {"enable_saturate_infinity": "yes"},
        {"auto_cast": "none", "auto_cast_type": "bf16"},
        {"extra": ("-O4",)},
        {"optlevel": 1, "extra": ("-O2",)},
        {"enable_mixed_precision_accumulation": True, "extra": ("--disable-mixed-precision-accumulation",)},
    ],
)
def test_impossible_options_are_refused(wrong):
    with pytest.raises(ConfigurationError, match="CompilerOptions"):
        CompilerOptions(**wrong)


def test_what_the_user_has_set_stays_and_is_not_repeated():
    environ = {"NEURON_CC_FLAGS": "--custom=1 -O1 --model-type transformer"}
    options = CompilerOptions(model_type="transformer", optlevel=1, auto_cast="none")
    assert options.merge(environ) == "--custom=1 -O1 --model-type=transformer --auto-cast=none"


@pytest.mark.parametrize(
    ("text", "options", "both"),
    [
        ("-O2", {"optlevel": 1}, ["-O2", "--optlevel=1"]),
        ("--auto-cast=all", {"auto_cast": "none"}, ["--auto-cast=all", "--auto-cast=none"]),
        (
            "--disable-mixed-precision-accumulation",
            {"enable_mixed_precision_accumulation": True},
            ["--disable-mixed-precision-accumulation", "--enable-mixed-precision-accumulation"],
        ),
    ],
)
def test_contradictions_name_both(text, options, both):
    with pytest.raises(ConfigurationError, match="contradict") as caught:
        CompilerOptions(**options).merge({"NEURON_CC_FLAGS": text})
    for name in (*both, "variable NEURON_CC_FLAGS", "your options"):
        assert name in str(caught.value)


def test_the_compiler_and_the_runtime_agree_on_logical_cores():
    with pytest.raises(ConfigurationError, match="NEURON_LOGICAL_NC_CONFIG=1"):
        CompilerOptions(lnc=2).merge({"NEURON_LOGICAL_NC_CONFIG": "1"})
    assert CompilerOptions(lnc=2).merge({"NEURON_LOGICAL_NC_CONFIG": "2"}) == "-lnc=2"


def settings(options=None, cache=None, environ=None, native=False):
    found = compile_settings(options or CompilerOptions(), cache or CompileCache(), environ or {}, native=native)
    return {setting.name: setting.value for setting in found}


def test_options_and_cache_become_variables():
    cache = CompileCache(location="/cache", retry_failed_compilation=True, log_level="INFO")
    assert settings(CompilerOptions(optlevel=1), cache, {"NEURON_CC_FLAGS": "-O1"}) == {
        "NEURON_COMPILE_CACHE_URL": "/cache",
        "NEURON_CC_FLAGS": "-O1 --cache_dir=/cache --retry_failed_compilation --log_level=INFO",
    }
    assert settings(environ={"NEURON_CC_FLAGS": "-O1"}) == {}
    assert settings(cache=CompileCache(no_cache=True)) == {"NEURON_CC_FLAGS": "--no_cache"}


def test_two_places_for_one_cache_are_refused_by_both_names():
    cache = CompileCache(location="/cache")
    with pytest.raises(ConfigurationError, match="NEURON_COMPILE_CACHE_URL=/other and the cache at /cache"):
        settings(cache=cache, environ={"NEURON_COMPILE_CACHE_URL": "/other"})
    with pytest.raises(ConfigurationError, match="--cache_dir=/other and --cache_dir=/cache"):
        settings(cache=cache, environ={"NEURON_CC_FLAGS": "--cache_dir=/other"})
    assert settings(cache=cache, environ={"NEURON_COMPILE_CACHE_URL": "/cache/"})


def test_the_native_device_has_a_cache_and_no_flags():
    assert settings(cache=CompileCache(location="/cache"), native=True) == {"TORCH_NEURONX_NEFF_CACHE_DIR": "/cache"}
    assert settings(cache=CompileCache(no_cache=True), native=True) == {"TORCH_NEURONX_NEFF_DISABLE_CACHE": "1"}
    for options, cache, word in (
        (CompilerOptions(optlevel=1), CompileCache(), "--optlevel=1"),
        (CompilerOptions(), CompileCache(location="s3://bucket/x"), "s3://bucket/x"),
        (CompilerOptions(), CompileCache(retry_failed_compilation=True), "retry_failed_compilation"),
    ):
        with pytest.raises(ConfigurationError, match="native device") as caught:
            settings(options, cache, native=True)
        assert word in caught.value.what


def test_an_option_of_the_cache_is_said_once():
    with pytest.raises(ConfigurationError, match="option of the compile cache"):
        settings(CompilerOptions(extra=("--no_cache",)), CompileCache(log_level="INFO"))
