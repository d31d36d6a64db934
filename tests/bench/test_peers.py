"""Peers that need a package of their own: without it a case says so."""

import sys

import pytest
from peers import Setting, library_function


def test_a_package_that_cannot_be_imported_skips_the_case_with_the_reason(monkeypatch):
    class Broken:
        def find_spec(self, name, *_):
            if name == "flash_attn_interface":
                raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(pytest.skip.Exception, match="flash_attn_3 cannot be used: libcudart.so.13"):
        library_function("flash_attn_3", "flash_attn_interface", "flash_attn_func")


def test_memory_that_torch_does_not_see_is_not_reported():
    """That of CUDA graphs' pools."""
    for setting in (Setting("timm", how, "bf16") for how in ("reduce-overhead", "compile", "eager")):
        assert setting.peak_known == (setting.how != "reduce-overhead")
