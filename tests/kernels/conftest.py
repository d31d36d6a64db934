"""A fixture that several files of the kernels' tests use."""

import pytest

from vitfast.kernels.libraries import cublaslt


@pytest.fixture
def afresh():
    """Nothing is known of the cuBLASLt extension, before and after."""
    cublaslt._library.cache_clear()
    cublaslt._chosen.cache_clear()
    yield
    cublaslt._library.cache_clear()
    cublaslt._chosen.cache_clear()
