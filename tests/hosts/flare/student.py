"""A site of a parity job: the template's data, model and training behind an Executor."""

from __future__ import annotations

from functools import partial

import task
import torch
from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedcohort.hosts.flare import Answers, seed_of, torch_answers, work_of

torch.set_num_threads(1)


class Student(Executor):
    """Trains as the simulator's client of the same number does."""

    def answers(self, fl_ctx: FLContext) -> Answers:
        site = fl_ctx.get_identity_name()
        return torch_answers(task.make_model, partial(task.load_data, site), classes=10)

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        site, model = fl_ctx.get_identity_name(), FLModelUtils.from_shareable(shareable)
        net = task.load_model(model.params)
        samples = task.train(net, site, model.current_round, seed_of(model), work_of(model, site))
        params = {key: value.numpy() for key, value in net.state_dict().items()}
        return FLModelUtils.to_shareable(FLModel(params=params, meta={"NUM_STEPS_CURRENT_ROUND": samples}))
