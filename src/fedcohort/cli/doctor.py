"""``fedcohort doctor``: say what this machine trains with, and what makes it slow."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from typing import Annotated, Any

import typer

from fedcohort.cli import options
from fedcohort.cli.output import Format, out, print_json
from fedcohort.core.terminal import say
from fedcohort.core.version import __version__
from fedcohort.simulate.cores import busy_cores, free_cores, own_cores, usable_cores  # counts from here on

# A module of each extra, which is not in any other.
_EXTRAS = {
    "sim": "torch", "flower": "flwr", "nvflare": "nvflare", "keyholder": "cryptography", "dp": "opendp",
    "report": "fastapi", "ray": "ray", "notebook": "matplotlib", "compiler": "ziglang", "trackers": "tensorboard",
}  # fmt: skip


def doctor(
    config: Annotated[str | None, typer.Argument(help="A TOML file, or 'demo': its models instead of ours.")] = None,
    set_: options.SetOption = None,
    device: options.DeviceOption = None,
    format: options.FormatOption = Format.TABLE,
) -> None:
    """Say which engine, extras and versions there are, what was chosen, what is slow, and why.

    For example:

    - fedcohort doctor
    - fedcohort doctor experiment.toml
    - fedcohort doctor demo -s model.name=net.py:Net
    """
    there = {extra: importlib.util.find_spec(module) is not None for extra, module in _EXTRAS.items()}
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "numpy") if there["sim"]]
    missing = [extra for extra, found in there.items() if not found]
    facts = {
        "fedcohort": ", ".join([__version__, f"Python {platform.python_version()}", *versions]),
        "extras": ", ".join(extra for extra, found in there.items() if found) or "none",
    }
    if missing:
        facts["extras"] += f"; not installed: {', '.join(missing)}"
    slow: list[str] = []
    if there["sim"]:
        facts |= _machine(slow) | _engines(config, set_ or [], device, slow)
    else:
        slow.append("there is no simulator without the extra sim: pip install 'fedcohort[sim]'")
    facts["slow"] = "; ".join(slow) or "nothing"
    if format is Format.JSON:
        print_json(facts)
        return
    for name, text in facts.items():
        say(out(), text, lead=f"{name:<11} ")


def _machine(slow: list[str]) -> dict[str, str]:
    """Describe device, cores, memory and compiler; add what is slow about them."""
    import torch

    from fedcohort.simulate.engine.library import cache_folder, find_compiler, load_compiled
    from fedcohort.simulate.memory_check import memory_limit

    found = {"device": "cpu"}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
        found["device"] = f"cuda: {name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
    elif shutil.which("nvidia-smi"):
        slow.append("there is an NVIDIA driver, but this build of torch sees no GPU")
    limit = os.environ.get("OMP_NUM_THREADS")
    found["cores"] = (
        f"{usable_cores()} of {os.cpu_count()} may be used, others keep {busy_cores():.1f} busy; clients train "
        f"{free_cores()} at a time, one thread each"
    )
    if usable_cores() < own_cores():
        why = f"OMP_NUM_THREADS={limit}" if limit else "the container's quota"
        slow.append(f"{why} leaves {usable_cores()} of {own_cores()} cores")
    if free_cores() < usable_cores():
        slow.append("other processes use the cores")
    found["memory"] = f"{memory_limit() / 2**30:.0f} GiB"
    try:
        found["compiler"] = f"{find_compiler()[0]}; libraries are kept in {cache_folder()}"
    except RuntimeError as error:
        found["compiler"] = str(error)
    if load_compiled("train") is None:
        found["compiler"] += "; not used"
        slow.append("without compiled code, the plain loop trains on the CPU (see the compiler)")
    return found


def _engines(config: str | None, overrides: list[str], device: str | None, slow: list[str]) -> dict[str, str]:
    """Say what trains each model of a configuration, or ours."""
    from fedcohort.simulate.config.experiment import Experiment
    from fedcohort.simulate.config.toml import find_table, override
    from fedcohort.simulate.rounds.prepare import prepare

    if config is None:
        data: Any = {"name": "synthetic", "samples": 100, "test_samples": 10, "classes": 4, "shape": [32, 32, 3]}
        sections: dict[str, Any] = {"seeds": [0], "data": data, "selectors": {"uniform": {}}}
        sections["scenario"] = {"partition": {"name": "iid", "clients": 10}}
        # One network of each kind that the engine treats in its own way.
        tables = [override({**sections, "model": {"name": name}}, overrides) for name in ("mlp", "lenet", "vgg11-bn")]
    else:
        tables = [override(find_table(config), overrides)]
    found = {}
    for table in tables:
        prepared = prepare(Experiment.from_dict(table), device)
        for number, places in prepared.groups.items():
            plan = prepared.experiment.plans[places[0]]
            kind, reason = prepared.engine_choice(number, device or plan.options.device)
            name = plan.model.name.rpartition("/")[2]
            found[name] = kind if reason is None else f"{kind}: {reason}"
            if reason is not None:
                slow.append(f"{name} is trained client by client")
    return found
