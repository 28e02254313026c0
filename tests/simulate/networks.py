"""Networks of every kind that people bring, small, over samples of (3, 8, 8) or of 12 tokens."""

import torch
import torch.nn.functional as F
from torch import nn

CLASSES = 5


class Block(nn.Module):
    def __init__(self, channels, norm):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), norm(channels), nn.ReLU())

    def forward(self, x):
        return x + self.body(x)


class ResNet(nn.Module):
    norm = nn.BatchNorm2d

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(Block(6, self.norm), Block(6, self.norm))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


class GroupNormResNet(ResNet):
    @staticmethod
    def norm(channels):
        return nn.GroupNorm(2, channels)


class CumulativeResNet(ResNet):
    @staticmethod
    def norm(channels):
        return nn.BatchNorm2d(channels, momentum=None)


class UntrackedResNet(ResNet):
    @staticmethod
    def norm(channels):
        return nn.BatchNorm2d(channels, track_running_stats=False, affine=False)


class DropoutCnn(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.2), nn.Flatten(), nn.Linear(36, 16),
            nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 16), nn.AlphaDropout(0.1), nn.Linear(16, CLASSES),
        )  # fmt: skip


class Noisy(nn.Module):
    """Draws by functions instead of layers, in ways of its own."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(192, 16), nn.Linear(16, CLASSES)

    def forward(self, x):
        h = F.rrelu(self.inner(x.flatten(1)), training=self.training)
        if self.training:
            h = h + 0.1 * torch.randn_like(h) + 0.1 * torch.rand(h.shape, device=h.device)
            h = h * torch.bernoulli(torch.full_like(h, 0.8)) + 0.01 * torch.normal(0.0 * h, 1.0)
        return self.head(F.dropout(h, 0.3, training=self.training))


class Recurrent(nn.Module):
    def __init__(self, kind=nn.GRU, **options):
        super().__init__()
        self.layer = kind(24, 6, batch_first=True, **options)
        self.head = nn.Linear(12 if options.get("bidirectional") else options.get("proj_size", 6), CLASSES)

    def forward(self, x):
        return self.head(self.layer(x.reshape(len(x), 8, 24))[0][:, -1])


class Gru(Recurrent):
    pass


class Lstm(Recurrent):
    def __init__(self):
        super().__init__(nn.LSTM, num_layers=2, dropout=0.3, bidirectional=True)


class ProjectedLstm(Recurrent):
    def __init__(self):
        super().__init__(nn.LSTM, proj_size=4)


class Cells(nn.Module):
    """Its own loop over cells, and a plain recurrent layer without biases."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LSTMCell(24, 6), nn.GRUCell(6, 6)
        self.third = nn.RNN(6, 6, bias=False)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        h, state, steps = None, None, []
        for part in x.reshape(len(x), 8, 24).unbind(1):
            state = self.first(part, state)
            h = self.second(state[0], h)
            steps.append(h)
        return self.head(self.third(torch.stack(steps))[1][-1])


class Vit(nn.Module):
    def __init__(self, batch_first=True):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.place = nn.Parameter(torch.randn(1, 5, 8) * 0.1)
        self.first = nn.Parameter(torch.zeros(1, 1, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=batch_first, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head, self.batch_first = nn.Linear(8, CLASSES), batch_first

    def forward(self, x):
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.first.expand(len(h), -1, -1), h], 1) + self.place
        h = self.encoder(h if self.batch_first else h.transpose(0, 1))
        return self.head(h[:, 0] if self.batch_first else h[0])


class SequenceFirst(Vit):
    """The batch is the second axis, where padding moves what dropout draws: only equal batches can be stacked."""

    def __init__(self):
        super().__init__(batch_first=False)


class LowRank(nn.Module):
    """A frozen network with a low-rank change, and a frozen layer with running statistics."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(192, 16)
        self.norm = nn.BatchNorm1d(16)
        for part in (self.frozen, self.norm):
            part.requires_grad_(False)
        self.down, self.up = nn.Linear(192, 2, bias=False), nn.Linear(2, 16, bias=False)
        nn.init.zeros_(self.up.weight)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        x = x.flatten(1)
        return self.head(F.relu(self.norm(self.frozen(x) + self.up(self.down(x)))))


class OwnState(nn.Module):
    """Buffers of its own: one put in place of the old one, one changed in place, a count and a mask."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(192, 8), nn.Linear(8, CLASSES)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("largest", torch.zeros(8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(8, dtype=torch.bool))

    def forward(self, x):
        h = self.body(x.flatten(1))
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
            self.largest.copy_(torch.maximum(self.largest, h.detach().amax(0)))
            self.steps += 1
        return self.head(torch.where(self.mask, h - self.mean, h) / (1 + self.largest) / (1 + 0.01 * self.steps))


class Words(nn.Module):
    """Tokens in, classes out."""

    def __init__(self):
        super().__init__()
        self.words, self.place = nn.Embedding(20, 8, padding_idx=0), nn.Embedding(12, 8)
        self.register_buffer("positions", torch.arange(12))
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, CLASSES)

    def forward(self, x):
        h = self.words(x) + self.place(self.positions)
        h = self.norm(h + self.attention(h, h, h)[0])
        return self.head(h.mean(1))


class Packed(nn.Module):
    """Has no stacked form: torch packs sequences by looking at their lengths."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.GRU(24, 6, batch_first=True), nn.Linear(6, CLASSES)

    def forward(self, x):
        lengths = torch.full((len(x),), 8)
        packed = nn.utils.rnn.pack_padded_sequence(x.reshape(len(x), 8, 24), lengths, batch_first=True)
        return self.head(self.layer(packed)[1][-1])


IMAGES = [
    "ResNet", "GroupNormResNet", "CumulativeResNet", "UntrackedResNet", "DropoutCnn", "Noisy", "Gru", "Lstm",
    "ProjectedLstm", "Cells", "Vit", "SequenceFirst", "LowRank", "OwnState",
]  # fmt: skip
EVERY = [*IMAGES, "Words"]
