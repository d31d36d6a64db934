"""Makes subclasses of libraries' classes at run time, and pickles their instances."""

from collections.abc import Callable

from torch import nn

# registry.py puts its function here: a library's class -> our subclass, None if there is none (any more).
subclass_of: list[Callable[[type], type | None]] = []


def subclass(cls: type, forward: Callable, **attributes) -> type:
    """A subclass of a library's class with another forward, under the same name.

    Its instances are pickled as the library's, and get the subclass that the vitfast which unpickles them makes.
    """
    body = dict(forward=forward, vitfast_class=cls, __reduce_ex__=_reduce, __module__=__name__)
    return type(cls)(cls.__name__, (cls,), body | attributes)


def _rebuild(cls: type) -> nn.Module:
    """An empty instance of our subclass; of the library's class where vitfast does not know it."""
    return cls.__new__(subclass_of[0](cls) or cls)


def _reduce(self, protocol):
    return _rebuild, (type(self).vitfast_class,), object.__reduce_ex__(self, 2)[2]
