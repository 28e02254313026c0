"""A round with two models and a server, small enough to work everything out by hand."""

import numpy as np

from fedcohort.training.aggregators import Members, Server

OLD = np.array([1.0, 1.0, 1.0])
MODELS = np.array([[2.0, 0.0, 4.0], [0.0, 2.0, 0.0]])


def members(share=(0.1, 0.3), steps=(4.0, 2.0), multiplicity=(1.0, 1.0), federation=10, momentum=0.0, **more):
    return Members(
        clients=np.arange(len(share)),
        share=np.array(share),
        steps=np.array(steps),
        federation=federation,
        multiplicity=np.array(multiplicity),
        momentum=momentum,
        **more,
    )


class LinearServer(Server):
    """Samples x of one feature, classes C = P: logit c of model w is w_c x. Every batch has all samples."""

    def __init__(self, make=np.array, inputs=((1.0,), (-0.5,)), classes=(0, 1)):
        self.make = make
        self.inputs = make(np.array(inputs).tolist())
        self.classes = classes

    def __len__(self):
        return len(self.inputs)

    @property
    def labels(self):
        return self.make(np.eye(3)[list(self.classes)].tolist())

    def batches(self, size, steps):
        for _ in range(steps):
            yield np.arange(len(self))[:size]

    def logits(self, models):
        return models[:, None, :] * self.inputs[None, :, :]

    def gradient(self, model, targets, places):
        x = self.inputs[places]
        powers = self.make(np.exp(np.asarray(model * x)).tolist())
        return ((powers / powers.sum(-1)[:, None] - targets) * x).sum(0) / len(places)
