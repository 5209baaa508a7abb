"""Which module is running, so that an allocation or a fault can be named after it."""

import weakref
from typing import Any

import torch
from torch.nn.modules import module as torch_module


class ModuleStack:
    """The path of the module whose forward is running.

    Attributes:
        path: Dotted path such as `transformer.h.3.attn`, or empty outside any forward.
    """

    def __init__(self) -> None:
        self.path = ""
        self._stack: list[str] = []
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, str | None] = weakref.WeakKeyDictionary()
        self._model: torch.nn.Module | None = None

    def watch(self, model: torch.nn.Module) -> None:
        """Learn the model's names and follow its forwards from now on."""
        self._model = model
        self._learn()
        torch_module.register_module_forward_pre_hook(self._enter)
        torch_module.register_module_forward_hook(self._leave, always_call=False)

    def where(self) -> str:
        """The place, for people."""
        return f"module `{self.path}`" if self.path else "the training loop"

    def reset(self) -> None:
        """Outside any module: an exception may have left its modules on the stack."""
        self._stack.clear()
        self.path = ""

    def _learn(self) -> None:
        if self._model is not None:
            for name, module in self._model.named_modules():
                self._names[module] = name or type(module).__name__

    def _enter(self, module: torch.nn.Module, _args: Any) -> None:
        if module not in self._names:  # not of the model, or put into it since: AutoTP replaces layers
            self._names[module] = None
            self._learn()
        name = self._names[module]
        self._stack.append(self.path)
        if name is not None:
            self.path = name

    def _leave(self, _module: torch.nn.Module, _args: Any, _out: Any) -> None:
        if self._stack:
            self.path = self._stack.pop()
