"""The built-in plugins keep the contract on CUDA ranks, as on the stand-in for the native device."""

from __future__ import annotations

from tests.native import test_conformance as native


class TestDataParallel(native.TestDataParallel):
    backends = ("cuda",)


class TestZero1(native.TestZero1):
    backends = ("cuda",)


class TestTensorParallel(native.TestTensorParallel):
    backends = ("cuda",)


class TestPipeline(native.TestPipeline):
    backends = ("cuda",)


class TestFullySharded(native.TestFullySharded):
    backends = ("cuda",)
    opt_out = native.HERE
