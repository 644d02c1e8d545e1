"""Calls the original method of torch from a tap, in the way torch itself would call it.

A class of tensors with its own `__torch_function__` is called before a method runs, and receives the attribute of
`torch.Tensor` with the method's name: the tap. A class that existed before the tap may compare the method by identity
(as torch's lazy parameters and torchvision's images do). So it receives the original method.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

_MOST_CLASSES: Final = 256


class Originals:
    """Calls what taps have replaced."""

    __slots__ = ("_early", "_ordinary", "_torch")

    def __init__(self, torch: Any) -> None:
        """All classes that exist now existed before the taps."""
        self._torch = torch
        self._early = _with_own_function(torch)
        self._ordinary: set[type[Any]] = set()  # known not to be one of these

    def call(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call it."""
        for each in args:
            if type(each) not in self._ordinary and self._is_early(type(each)):
                overrides = self._torch.overrides
                asked = tuple(each for each in args if type(each) is not self._torch.Tensor)
                if overrides.has_torch_function(asked):
                    return overrides.handle_torch_function(original, asked, *args, **kwargs)
                break
        return original(*args, **kwargs)

    def _is_early(self, kind: type[Any]) -> bool:
        """Whether it is one of those classes, or derived from one; if not, that is remembered."""
        if not self._early.isdisjoint(kind.__mro__):
            return True
        if len(self._ordinary) < _MOST_CLASSES:
            self._ordinary.add(kind)
        return False


def _with_own_function(torch: Any) -> frozenset[type[Any]]:
    """The classes of tensors that have their own `__torch_function__`."""
    found: list[type[Any]] = []
    default = torch.Tensor.__torch_function__.__func__
    disabled = torch._C._disabled_torch_function_impl
    rest = list(torch.Tensor.__subclasses__())
    while rest:
        kind = rest.pop()
        rest.extend(kind.__subclasses__())
        function = kind.__torch_function__
        if getattr(function, "__func__", function) not in (default, disabled):
            found.append(kind)
    return frozenset(found)
