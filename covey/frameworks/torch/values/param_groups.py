"""Parameter groups of optimizers, to which a script may add others while it trains (`add_param_group`): a process that
takes over later never passes there, or passes there again."""

from collections.abc import Mapping, Sequence
from typing import Any

from covey.core.errors import CoveyError
from covey.frameworks.torch.devices import Say
from covey.frameworks.torch.gradients import CANNOT_HEAL
from covey.frameworks.torch.values.plain_values import difference
from covey.healing.state_pieces import CANNOT, SAME


class ParameterGroups:
    """Which parameters each optimizer has, by group."""

    def __init__(self, optimizers: Sequence[Any], parameters: Sequence[tuple[str, Any]], say: Say) -> None:
        """`parameters`: those of all models, by name. `say` gets lines for people."""
        self._optimizers, self._parameters, self._say = optimizers, parameters, say
        self._numbers = {id(each): at for at, (_, each) in enumerate(parameters)}
        self._counts: list[list[int]] = []
        self._places: list[list[list[int]]] = []
        self._restored: list[list[set[int]]] = [[] for _ in optimizers]
        """By optimizer: ids of the parameters of each group that it has from another process, and not from the
        script."""

    def places(self) -> list[list[list[int]]]:
        """By optimizer and group: numbers of the parameters. CoveyError when one belongs to no model."""
        counts = [[len(group["params"]) for group in each.param_groups] for each in self._optimizers]
        if counts != self._counts:
            self._places = [self._of(each) for each in self._optimizers]
            self._counts = counts
        return self._places

    def restore(self, states: Sequence[Mapping[str, Any]], places: list[list[list[int]]] | None) -> None:
        """Add the groups that these states of the optimizers have, and the script here has not added. `places`: as
        another process gave them; None: it gave none. CoveyError when the groups are others."""
        for at, optimizer in enumerate(self._optimizers if places is not None else ()):
            assert places is not None
            mine, theirs = self._of(optimizer), places[at]
            if mine != theirs[: len(mine)]:
                why = f"parameter groups of {type(optimizer).__qualname__} {difference(mine, theirs)}"
                raise CoveyError(CANNOT, why, SAME)
            for group, numbers in zip(states[at]["param_groups"][len(mine) :], theirs[len(mine) :], strict=True):
                parameters = [self._parameters[number][1] for number in numbers]
                optimizer.add_param_group({**group, "params": parameters})
                self._restored[at].append(set(map(id, parameters)))

    def follow(self) -> None:
        """From now on a group that came with the state is not added again: the script adds it at the beginning of an
        epoch, into which this process came. Adding one raises CoveyError where it has gradients of earlier steps."""
        for at, optimizer in enumerate(self._optimizers):
            self._follow(optimizer, self._restored[at])

    def _follow(self, optimizer: Any, restored: list[set[int]]) -> None:
        add = optimizer.add_param_group

        def add_unless_there(group: dict[str, Any]) -> None:
            given = group["params"]
            parameters = list(given) if isinstance(given, (list, tuple)) or not hasattr(given, "shape") else [given]
            tensors = [each[1] if isinstance(each, tuple) else each for each in parameters]
            ids = set(map(id, tensors))
            if any(each.grad is not None for each in tensors):
                why = "a parameter that comes to an optimizer has gradients of earlier steps, which no successor has"
                raise CoveyError(CANNOT_HEAL, why, "set .grad of its parameters to None before add_param_group")
            if ids in restored:
                restored.remove(ids)
                self._say(
                    f"has the group of {len(ids)} parameters already that the script adds: it came with the state"
                )
            else:
                add({**group, "params": parameters})

        optimizer.add_param_group = add_unless_there

    def _of(self, optimizer: Any) -> list[list[int]]:
        for at, group in enumerate(optimizer.param_groups):
            for each in group["params"]:
                if id(each) not in self._numbers:
                    why = (
                        f"group {at} of {type(optimizer).__qualname__} has a parameter of shape {tuple(each.shape)} "
                        "that is in none of the models, so that its gradient is not averaged"
                    )
                    raise CoveyError(CANNOT_HEAL, why, "make it a parameter of a model, and give attach that model")
        return [[self._numbers[id(each)] for each in group["params"]] for group in optimizer.param_groups]
