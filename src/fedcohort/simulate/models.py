"""Build the papers' models by name, or any ``nn.Module`` the user names as ``file.py:Class`` or ``module:Class``.

The built-in ones are plain ``nn.Sequential`` stacks without dropout or other hidden state, so a model is just a vector
and many models can be trained as one batched program. Only ``vgg11-bn`` has running statistics, which are sent along
with its parameters.

.. [Tang2022] M. Tang et al., "FedCor: Correlation-Based Active Client Selection Strategy for Heterogeneous Federated
   Learning", Appendix C.1, which follows the TensorFlow tutorial on convolutional networks.
.. [Simonyan2015] K. Simonyan, A. Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition".
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Sequence

import torch
from torch import nn

from fedcohort.core.errors import InputError
from fedcohort.core.registry import Registry, is_reference, resolve_reference

MODELS: Registry[nn.Module] = Registry("model", references=True)

Shape = tuple[int, ...]


def build_model(
    name: str,
    input_shape: Sequence[int],
    classes: int,
    *,
    integers: bool = False,
    output: Sequence[int] | None = None,
) -> nn.Module:
    """Build the model ``name`` and check that it turns one input into one number per class.

    Parameters
    ----------
    name : str
        A registered name, or ``file.py:Class`` or ``module:Class`` for the user's own class, which is constructed with
        ``(input_shape, classes)`` or, if it does not take these, without arguments.
    input_shape : sequence of int
        Shape of one sample: ``(features,)`` or ``(channels, height, width)``.
    classes : int
        Number of classes; for other tasks, of numbers or tokens.
    integers : bool
        Whether inputs are whole numbers (tokens, categories).
    output : sequence of int, optional
        Shape of the model's output for one sample. Default: ``(classes,)``.

    Returns
    -------
    torch.nn.Module
        Initialised from torch's global generator; see :meth:`Engine.init` for a seeded one.

    Examples
    --------
    >>> sum(p.numel() for p in build_model("mlp", (1, 28, 28), 10).parameters())
    52500
    >>> build_model("lenet", (3, 32, 32), 10)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    shape = tuple(int(side) for side in input_shape)
    # With a single class the loss is always zero.
    if output is None and classes < 2:
        raise InputError(f"A classifier needs at least 2 classes. Got {classes}.")
    try:
        model = _named_class(name, shape, classes) if is_reference(name) else MODELS.get(name)(shape, classes)
    except RuntimeError as error:
        raise InputError(f"The model {name!r} cannot be built for inputs of shape {shape}: {error}") from error
    _check_output(model, name, shape, tuple(output or (classes,)), integers)
    return model


def _named_class(name: str, shape: Shape, classes: int) -> nn.Module:
    cls, _ = resolve_reference(name)
    if not callable(cls) or (isinstance(cls, type) and not issubclass(cls, nn.Module)):
        what = f"the class {cls.__name__}" if isinstance(cls, type) else f"a {type(cls).__name__}"
        raise InputError(
            f"The model {name!r} is {what}, not a torch.nn.Module.",
            hint="name a class that derives from torch.nn.Module, or a function that returns one",
        )
    # Calling it and catching TypeError would hide errors inside the constructor.
    signature = inspect.signature(cls)
    # Whoever knows the shape uses it; a model that is made for one dataset takes nothing.
    for arguments in ((shape, classes), ()):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        try:
            model = cls(*arguments)
        except Exception as error:  # the user's own code
            raise InputError(
                f"The model {name!r} cannot be built with {arguments}: {type(error).__name__}: {error}."
            ) from error
        if not isinstance(model, nn.Module):
            raise InputError(f"The model {name!r} is a {type(model).__name__}, not a torch.nn.Module.")
        return model
    raise InputError(
        f"The model {name!r} has the constructor {signature}; it must take (input_shape, classes) or nothing."
    )


def _check_output(model: nn.Module, name: str, shape: Shape, expected: Shape, integers: bool) -> None:
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            # With a single sample, a model that drops the batch axis would pass.
            output = model(torch.zeros(2, *shape, dtype=torch.int64 if integers else torch.float32))
    except Exception as error:  # the user's own code may raise anything
        raise InputError(
            f"The model {name!r} cannot take {'whole numbers' if integers else 'inputs'} of shape {shape} (channels "
            f"first): {error}",
            hint="choose a model made for inputs of this size",
        ) from error
    finally:
        model.train(training)
    if not isinstance(output, torch.Tensor) or tuple(output.shape) != (2, *expected):
        got = tuple(output.shape[1:]) if isinstance(output, torch.Tensor) else type(output).__name__
        raise InputError(
            f"The output of the model {name!r} does not fit the {'classes' if len(expected) == 1 else 'tokens'}: for "
            f"one sample it gives {got}, but it must give {expected}, one number per class or predicted number.",
            hint=f"give its last layer {expected[-1]} outputs",
        )


def _dense(shape: Shape, widths: Sequence[int], classes: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    sides = [math.prod(shape), *widths, classes]
    # No ReLU after the last layer, whose outputs are logits.
    for inputs, outputs in itertools.pairwise(sides):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@MODELS.register("mlp")
def _mlp(shape: Shape, classes: int) -> nn.Module:
    """Two hidden layers of 64 and 30 units ([Tang2022]_, Fashion-MNIST)."""
    return _dense(shape, (64, 30), classes)


@MODELS.register("mlp-64")
def _mlp_64(shape: Shape, classes: int) -> nn.Module:
    """One hidden layer of 64 units."""
    return _dense(shape, (64,), classes)


@MODELS.register("logistic")
def _logistic(shape: Shape, classes: int) -> nn.Module:
    """Multinomial logistic regression."""
    return _dense(shape, (), classes)


@MODELS.register("fedcor-cnn")
def _fedcor_cnn(shape: Shape, classes: int) -> nn.Module:
    """Three 3x3 convolutions of 32, 64 and 64 kernels, a dense layer of 64 ([Tang2022]_, CIFAR-10).

    As in the TensorFlow tutorial that the paper cites: no padding, 2x2 max-pooling after the first two convolutions.
    """
    channels, height, width = _image(shape, "fedcor-cnn")
    rows, columns = (((side - 2) // 2 - 2) // 2 - 2 for side in (height, width))
    return nn.Sequential(
        *(nn.Conv2d(channels, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(64 * rows * columns, 64), nn.ReLU(), nn.Linear(64, classes)),
    )


@MODELS.register("lenet")
def _lenet(shape: Shape, classes: int) -> nn.Module:
    """Network of the PyTorch CIFAR-10 tutorial: 5x5 convolutions of 6 and 16, dense 120 and 84."""
    channels, height, width = _image(shape, "lenet")
    rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
    return nn.Sequential(
        *(nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * rows * columns, 120), nn.ReLU()),
        *(nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes)),
    )


@MODELS.register("vgg11")
def _vgg11(shape: Shape, classes: int) -> nn.Module:
    """VGG-11 ([Simonyan2015]_, configuration A) for images of at least 32x32.

    It has no BatchNorm or dropout, and one dense layer after the convolutions, as is usual for CIFAR. Convolutions are
    initialised from He's normal distribution, because torch's default does not train a stack this deep.
    """
    return _build_vgg11("vgg11", shape, classes, normalised=False)


@MODELS.register("vgg11-bn")
def _vgg11_bn(shape: Shape, classes: int) -> nn.Module:
    """VGG-11 as above, with batch normalisation after each convolution; running statistics are part of the model."""
    return _build_vgg11("vgg11-bn", shape, classes, normalised=True)


def _build_vgg11(name: str, shape: Shape, classes: int, *, normalised: bool) -> nn.Module:
    channels, height, width = _image(shape, name)
    if min(height, width) < 32:
        raise InputError(
            f"The model {name!r} halves its input five times and needs images of at least 32x32. Got {height}x{width}.",
            hint="use 'lenet' or 'fedcor-cnn' for smaller images",
        )
    layers: list[nn.Module] = []
    for block in ((64,), (128,), (256, 256), (512, 512), (512, 512)):
        for kernels in block:
            convolution = nn.Conv2d(channels, kernels, 3, padding=1)
            nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]  # a Conv2d of ours has one
            layers += [convolution, *([nn.BatchNorm2d(kernels)] if normalised else []), nn.ReLU()]
            channels = kernels
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512 * (height // 32) * (width // 32), classes))


def _image(shape: Shape, name: str) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise InputError(
            f"The model {name!r} takes images of shape (channels, height, width). Got samples of shape {shape}.",
            hint="use 'mlp' or 'logistic' for flat features",
        )
    return shape[0], shape[1], shape[2]
