# SPDX-License-Identifier: Apache-2.0
"""Options of the Neuron compiler as a dataclass."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from neuron_accel.errors import ConfigurationError
from neuron_accel.neuron import flags
from neuron_accel.neuron.flags import VALUES, VARIABLE, Flag

_NAMES = {
    "model_type": "--model-type",
    "distribution_strategy": "--distribution-strategy",
    "auto_cast": "--auto-cast",
    "auto_cast_type": "--auto-cast-type",
    "optlevel": "--optlevel",
    "lnc": "--lnc",
    "target": "--target",
}
_SWITCHES = {
    "enable_mixed_precision_accumulation": "--enable-mixed-precision-accumulation",
    "enable_saturate_infinity": "--enable-saturate-infinity",
}


@dataclass(frozen=True, kw_only=True)
class CompilerOptions:
    """Options of the Neuron compiler. None is the compiler's default.

    Args:
        model_type: kind of model; ``"transformer"`` for language models.
        distribution_strategy: ``"llm-training"`` for sharded training of language models; ``"generic"`` is the
            compiler's default.
        auto_cast: operations that the compiler computes in a smaller dtype (``"none"``, ``"matmult"``, ``"all"``). With
            ``"none"``, which fp32 and autocast need, dtypes are those of torch. It is the compiler's default since SDK
            2.27; earlier versions cast matrix products.
        auto_cast_type: the smaller dtype.
        optlevel: optimization level from 1 (fastest compilation) to 3; the compiler's default is 2.
        lnc: number of physical cores in a logical core (Trn2, Trn3), as NEURON_LOGICAL_NC_CONFIG at run time.
        target: instance family to compile for, if it is not that of this machine.
        enable_mixed_precision_accumulation: whether to keep intermediate sums in fp32.
        enable_saturate_infinity: whether to replace infinities by the largest finite number.
        extra: further options, as text: ``("--tensorizer-options=...",)``. An option that may be misspelt causes a
            warning.

    Raises:
        ConfigurationError: if a value is not one of those listed, or options contradict each other.

    Example::

        options = CompilerOptions(model_type="transformer", auto_cast="none")
        os.environ["NEURON_CC_FLAGS"] = options.merge(os.environ)
    """

    model_type: Literal["generic", "transformer", "unet-inference", "cnn-training"] | None = None
    distribution_strategy: Literal["generic", "llm-training"] | None = None
    auto_cast: Literal["none", "matmult", "all"] | None = None
    auto_cast_type: Literal["bf16", "fp16", "tf32", "fp8_e4m3"] | None = None
    optlevel: Literal[1, 2, 3] | None = None
    lnc: Literal[1, 2] | None = None
    target: Literal["trn1", "trn1n", "trn2", "trn3"] | None = None
    enable_mixed_precision_accumulation: bool | None = None
    enable_saturate_infinity: bool | None = None
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field, option in _NAMES.items():
            value = getattr(self, field)
            number = isinstance(value, int) and not isinstance(value, bool)
            expects_number = field in ("optlevel", "lnc")
            if value is not None and (str(value) not in VALUES[option] or number != expects_number):
                raise ConfigurationError(
                    f"{field} is {value!r}.",
                    where="CompilerOptions",
                    why=f"it becomes {option}, which takes {', '.join(VALUES[option])}",
                    fix="pass one of them, or None for the compiler's default",
                )
        for field in _SWITCHES:
            if getattr(self, field) not in (None, True, False):
                raise ConfigurationError(
                    f"{field} is {getattr(self, field)!r}.", where="CompilerOptions", fix="pass True, False or None"
                )
        if self.auto_cast == "none" and self.auto_cast_type is not None:
            raise ConfigurationError(
                f"auto_cast='none' and auto_cast_type={self.auto_cast_type!r} contradict each other.",
                where="CompilerOptions",
                why="nothing is cast, so there is no dtype to cast to",
                fix="leave auto_cast_type out, or set auto_cast to 'matmult' or 'all'",
            )
        object.__setattr__(self, "extra", tuple(self.extra))
        self.flags()
        for text in self.extra:
            for remark in flags.remarks(text, "CompilerOptions.extra"):
                warnings.warn(remark, stacklevel=3)

    @classmethod
    def for_training(cls, *, mixed_precision: str = "no", lnc: int | None = None, **options: object) -> CompilerOptions:
        """Options for training language models: no automatic casts, and under bf16 sums in fp32.

        Args:
            mixed_precision: "no" or "bf16", as in Accelerate.
            lnc: see the class.
            options: further fields, which override these.
        """
        chosen: dict[str, object] = {
            "model_type": "transformer",
            "distribution_strategy": "llm-training",
            "auto_cast": "none",
            "enable_mixed_precision_accumulation": True if mixed_precision == "bf16" else None,
            "lnc": lnc,
        }
        return cls(**{**chosen, **options})  # type: ignore[arg-type]

    def flags(self) -> tuple[Flag, ...]:
        """The options that are set, as flags.

        Raises:
            ConfigurationError: if ``extra`` is malformed or contradicts a field.
        """
        own = [
            Flag(option, str(getattr(self, field)), f"{option}={getattr(self, field)}")
            for field, option in _NAMES.items()
            if getattr(self, field) is not None
        ]
        for field, option in _SWITCHES.items():
            value = getattr(self, field)
            if value is False and field == "enable_mixed_precision_accumulation":
                own.append(
                    Flag("--disable-mixed-precision-accumulation", None, "--disable-mixed-precision-accumulation")
                )
            elif value:
                own.append(Flag(option, None, option))
        extra = [flag for text in self.extra for flag in flags.parse(text, "CompilerOptions.extra")]
        return flags.combine(own, extra, where="CompilerOptions", other="CompilerOptions.extra")

    def merge(self, environ: Mapping[str, str], others: tuple[Flag, ...] = ()) -> str:
        """Returns the text for ``NEURON_CC_FLAGS``: the flags in the environment, followed by these options.

        Args:
            environ: environment variables.
            others: further flags, those of a :class:`~neuron_accel.neuron.CompileCache`.

        Raises:
            ConfigurationError: if the variable is malformed, or contradicts these options.
        """
        users = flags.parse(environ.get(VARIABLE, ""))
        for name in flags.CACHE_OPTIONS:
            mine = [flag for flag in self.flags() if flag.name == name]
            if mine and others:
                raise ConfigurationError(
                    f"{mine[0].text} is an option of the compile cache.",
                    where="CompilerOptions.extra",
                    why="a CompileCache is given as well",
                    fix="pass it to the CompileCache",
                )
        merged = flags.combine(users, [*self.flags(), *others], where=f"the variable {VARIABLE}", other="your options")
        self._check_lnc(environ, merged)
        return flags.write(merged)

    @staticmethod
    def _check_lnc(environ: Mapping[str, str], merged: tuple[Flag, ...]) -> None:
        compiled = next((flag for flag in merged if flag.name == "--lnc"), None)
        running = environ.get("NEURON_LOGICAL_NC_CONFIG", "").strip()
        if compiled is not None and running and running != compiled.value:
            raise ConfigurationError(
                f"{compiled.text} and NEURON_LOGICAL_NC_CONFIG={running} contradict each other.",
                where=f"{VARIABLE}; NEURON_LOGICAL_NC_CONFIG",
                why="a graph runs only on the logical cores that it was compiled for",
                fix="set both to the same number, or leave both out",
            )

    def replace(self, **changes: object) -> CompilerOptions:
        """Returns a copy with changed fields."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]
