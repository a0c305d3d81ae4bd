"""One step of an optimizer over arrays, made where a round of gradients is summed: by an aggregator or by ranks.

Each step has bit for bit the result of these lines of numpy, in the type of the parameters (w; g is the sum or mean, t
the number of the step from 1 on, moments are zero before the first step). Parameters of 16 bits are widened to float32
first, the type of g, moments and all else, and the new ones are rounded once at the end
(`covey.tensors.numbers.types`):

    SGD     g = g + weight_decay * w                     # where there is weight decay
            v = momentum * v + g                         # where there is momentum; else v is g
            w = w - rate * v

    Adam    w = w - (rate * weight_decay) * w            # where there is weight decay and it is decoupled;
            g = g + weight_decay * w                     # ... and where it is not
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * (g * g)
            w = w - (rate / (1 - beta1**t)) * m / (np.sqrt(v / (1 - beta2**t)) + epsilon)
"""

from collections.abc import Sequence

import numpy as np

from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.pieces import pieces
from covey.tensors.numbers.updates import SGD, Adam, Update


def take_step(update: Update, step: int, rate: float, old: Sequence[Array], new: Sequence[Array]) -> None:
    """Make a step from `old`, the parameters and their moments, to `new`, of the same length; the gradient is where the
    new parameters go. All have the type in which numbers are added. `step` counts from 1."""
    with np.errstate(all="ignore"):  # as wherever tensors are added
        for here in pieces(0, len(old[0])):
            _step(update, step, rate, [each[here] for each in old], [each[here] for each in new])


def _step(update: Update, step: int, rate: float, old: Sequence[Array], new: Sequence[Array]) -> None:
    match update:
        case SGD():
            _sgd(update, rate, old, new)
        case Adam():
            _adam(update, step, rate, old, new)


def _sgd(update: SGD, rate: float, old: Sequence[Array], new: Sequence[Array]) -> None:
    before, change = old[0], new[0]
    if update.weight_decay:
        change += update.weight_decay * before
    if update.momentum:
        velocity = np.multiply(old[1], update.momentum, out=new[1])
        velocity += change
        np.multiply(velocity, rate, out=change)
    else:
        change *= rate
    np.subtract(before, change, out=new[0])


def _adam(update: Adam, step: int, rate: float, old: Sequence[Array], new: Sequence[Array]) -> None:
    before, gradient = old[0], new[0]
    if update.weight_decay and update.decoupled:
        before = before - (rate * update.weight_decay) * before
    elif update.weight_decay:
        gradient += update.weight_decay * before
    first = np.multiply(old[1], update.beta1, out=new[1])
    first += (1 - update.beta1) * gradient
    second = np.multiply(old[2], update.beta2, out=new[2])
    gradient *= gradient
    gradient *= 1 - update.beta2
    second += gradient
    size = np.divide(second, 1 - update.beta2**step, out=gradient)
    np.sqrt(size, out=size)
    size += update.epsilon
    change = (rate / (1 - update.beta1**step)) * first
    change /= size
    np.subtract(before, change, out=new[0])
