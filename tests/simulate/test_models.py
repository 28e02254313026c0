"""Models by name."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn

from fedcohort.core.errors import InputError, UnknownNameError
from fedcohort.simulate.models import MODELS, build_model


def count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [
        ("logistic", (1, 28, 28), 7850),
        ("mlp-64", (784,), 784 * 64 + 64 + 64 * 10 + 10),
        ("mlp", (1, 28, 28), 784 * 64 + 64 + 64 * 30 + 30 + 30 * 10 + 10),
        ("lenet", (3, 32, 32), 62006),  # as in the PyTorch tutorial
        ("fedcor-cnn", (3, 32, 32), 122570),  # as in the TensorFlow tutorial
        ("vgg11", (3, 32, 32), 9225610),
    ],
)
def test_sizes(name, shape, parameters):
    model = build_model(name, shape, 10)
    assert count(model) == parameters
    assert model(torch.zeros(3, *shape)).shape == (3, 10)


@pytest.mark.parametrize("name", MODELS.names())
def test_a_model_has_no_state_but_its_parameters(name):
    model = build_model(name, (3, 32, 32), 7)
    assert not list(model.buffers()) or name == "vgg11-bn"  # whose running statistics travel along
    assert all(layer.__class__.__name__ != "Dropout" for layer in model.modules())


def test_vgg_keeps_the_scale_of_its_input():
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        out = build_model("vgg11", (3, 32, 32), 10)(torch.randn(8, 3, 32, 32))
    assert 0.05 < float(out.std()) < 5


def test_unknown_names():
    with pytest.raises(UnknownNameError, match="'lenet'"):
        build_model("lenett", (3, 32, 32), 10)
    with pytest.raises(UnknownNameError, match="no_such_module_here"):
        build_model("no_such_module_here:Net", (3, 32, 32), 10)
    with pytest.raises(UnknownNameError, match=r"torch\.nn:Linear"):
        build_model("torch.nn:Linera", (3,), 10)


@pytest.fixture
def zoo(monkeypatch):
    module = types.ModuleType("zoo_of_models")

    class Sized(nn.Sequential):
        def __init__(self, input_shape, classes):
            super().__init__(nn.Flatten(), nn.Linear(input_shape[0], classes))

    class Fixed(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(4, 3))

    class Odd(nn.Module):
        def __init__(self, a, b, c):
            super().__init__()

    module.Sized, module.Fixed, module.Odd, module.number = Sized, Fixed, Odd, lambda: 3
    monkeypatch.setitem(sys.modules, "zoo_of_models", module)


def test_a_users_class(zoo):
    assert build_model("zoo_of_models:Sized", (4,), 5)(torch.zeros(1, 4)).shape == (1, 5)
    assert count(build_model("zoo_of_models:Fixed", (4,), 3)) == 15
    with pytest.raises(InputError, match="constructor"):
        build_model("zoo_of_models:Odd", (4,), 3)
    with pytest.raises(InputError, match="not a torch"):
        build_model("zoo_of_models:number", (4,), 3)


def test_output_that_does_not_fit(zoo):
    with pytest.raises(InputError, match=r"\(3,\).*\(10,\)"):
        build_model("zoo_of_models:Fixed", (4,), 10)
    with pytest.raises(InputError, match="inputs of shape"):
        build_model("zoo_of_models:Fixed", (5,), 3)
    with pytest.raises(InputError, match="at least 2 classes"):
        build_model("mlp", (4,), 1)


def test_inputs_too_small_or_flat():
    with pytest.raises(InputError, match="32x32"):
        build_model("vgg11", (1, 28, 28), 10)
    with pytest.raises(InputError, match=r"\(channels, height, width\)"):
        build_model("lenet", (784,), 10)
    with pytest.raises(InputError, match="lenet"):
        build_model("lenet", (1, 8, 8), 10)
