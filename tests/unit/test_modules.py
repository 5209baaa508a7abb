"""The module that an allocation is named after."""

import torch

from dstune.estimator.modules import ModuleStack


class Noting(torch.nn.Module):
    """Notes where the stack says that it is."""

    def __init__(self, stack: ModuleStack) -> None:
        super().__init__()
        self.stack = stack
        self.seen: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.stack.path)
        return x


def test_a_layer_that_was_put_in_later_has_the_name_of_its_place() -> None:
    """AutoTP puts its own layers where the model's were, and new objects get the addresses of dead ones."""
    stack = ModuleStack()
    model = torch.nn.ModuleDict({str(number): Noting(stack) for number in range(8)})
    stack.watch(model)
    for number in reversed(range(8)):
        model[str(number)] = Noting(stack)
    x = torch.ones(1)
    for layer in model.values():
        layer(x)
    assert [layer.seen for layer in model.values()] == [[str(number)] for number in range(8)]


def test_a_module_outside_the_model_does_not_change_the_place() -> None:
    stack = ModuleStack()
    stack.watch(torch.nn.ModuleDict({"inside": Noting(stack)}))
    outside = Noting(stack)
    outside(torch.ones(1))
    assert outside.seen == [""]
    assert stack.path == ""
