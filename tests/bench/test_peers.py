"""Peers that need a package of their own: what is around it is right, and without it a case says so."""

import sys

import bench_ops
import harness
import pytest
from libraries import QUACK, imported
from peer_libraries import install_quack
from peers import Setting
from shapes import Shape

NANO = Shape("Nano/8", 16, 6)
WITH_QUACK = [name for name, op in bench_ops.OPS.items() if QUACK in op.impls]


@pytest.mark.parametrize("name", WITH_QUACK)
def test_quack_computes_the_operation_where_it_is_installed(name, monkeypatch):
    with pytest.raises(pytest.skip.Exception, match="quack-kernels cannot be used: No module named 'quack"):
        bench_ops.function_of(name, NANO, QUACK)
    install_quack(monkeypatch)
    direction = "forward" if QUACK in bench_ops.OPS[name].forward_only else "both"
    operation = harness.Operation(
        bench_ops.case_of(name, NANO), QUACK, bench_ops.function_of(name, NANO, QUACK), direction
    )
    assert operation.compare("")["error"] < 1e-5


def test_quack_is_not_asked_for_a_backward_that_it_lacks(monkeypatch):
    """It has RMSNorm's and the MLP's."""
    assert sorted(WITH_QUACK) == ["layer_norm", "linear_gelu", "mlp", "rms_norm"]
    monkeypatch.setattr(bench_ops, "function_of", lambda *_: pytest.fail("it was called"))
    for test, direction in ((bench_ops.test_linear_gelu, "backward"), (bench_ops.test_layer_norm, "both")):
        with pytest.raises(pytest.skip.Exception, match="quack has no backward of l"):
            test(None, next(iter(bench_ops.SHAPES)), direction, QUACK)


def test_a_package_that_cannot_be_imported_skips_the_case_with_the_reason(monkeypatch):
    class Broken:
        def find_spec(self, name, *_):
            if name == "flash_attn_interface":
                raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(pytest.skip.Exception, match="flash_attn_3 cannot be used: libcudart.so.13"):
        imported("flash_attn_3", "flash_attn_interface")


def test_memory_that_torch_does_not_see_is_not_reported():
    """That of CUDA graphs' pools."""
    for setting in (Setting("timm", how, "bf16") for how in ("reduce-overhead", "compile", "eager")):
        assert setting.peak_known == (setting.how != "reduce-overhead")
