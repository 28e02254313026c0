import importlib.metadata
import itertools
import logging
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from fedcohort.core.errors import ParameterError, RegistryError, UnknownNameError
from fedcohort.core.protocol import SELECTORS
from fedcohort.core.registry import Registry
from fedcohort.scenario import PARTITIONS
from fedcohort.training.aggregators import AGGREGATORS
from fedcohort.training.filters import FILTERS

_NUMBER = itertools.count()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write a package of tools that fills a registry in a module below it, as for selectors; return their names."""
    made = f"tools_{next(_NUMBER)}"

    def write(**modules):
        (tmp_path / f"{made}_words.py").write_text(
            f"from fedcohort.core.registry import Registry\nTOOLS = Registry('tool', package='{made}')\n"
        )
        folder = tmp_path / made
        folder.mkdir(exist_ok=True)
        for name, text in modules.items():
            head = f"from {made}_words import TOOLS\n"
            (folder / f"{name}.py").write_text(head + textwrap.dedent(text).replace("PACKAGE", made))
        monkeypatch.syspath_prepend(tmp_path)
        return made, importlib.import_module(f"{made}_words").TOOLS

    yield write
    for name in [name for name in sys.modules if name.startswith(made)]:
        del sys.modules[name]


INIT = "import PACKAGE.saw, PACKAGE.hammer\n"
SAW = "@TOOLS.register('saw')\nclass Saw: pass\n"
HAMMER = "@TOOLS.register('hammer')\nclass Hammer: pass\n"


@pytest.mark.parametrize(
    "look",
    [
        lambda tools: tools.names() == ["hammer", "saw"],
        lambda tools: list(tools) == ["hammer", "saw"],
        lambda tools: "saw" in tools,
        lambda tools: "sow" not in tools,
        lambda tools: tools.get("saw").__name__ == "Saw",
        lambda tools: type(tools.create("saw")).__name__ == "Saw",
    ],
)
def test_the_first_lookup_imports_the_package(package, look):
    made, tools = package(__init__=INIT, saw=SAW, hammer=HAMMER)
    assert made not in sys.modules
    assert look(tools)
    assert f"{made}.hammer" in sys.modules


def test_an_unknown_name_lists_all_names(package):
    _, tools = package(__init__=INIT, saw=SAW, hammer=HAMMER)
    with pytest.raises(UnknownNameError, match=r"'hamer'.*hammer, saw\.\n  hint: .*'hammer'"):
        tools.create("hamer")


@pytest.mark.parametrize("ask", ["TOOLS.names()", "list(TOOLS)", "'hammer' in TOOLS", "TOOLS.get('hammer')"])
@pytest.mark.parametrize("first", ["a look", "an import"])
def test_a_lookup_during_the_import_is_refused(package, ask, first):
    made, tools = package(__init__=INIT, saw=SAW + f"answer = {ask}\n", hammer=HAMMER)
    with pytest.raises(RegistryError, match=made):
        tools.names() if first == "a look" else importlib.import_module(made)


def test_registered_names_can_be_looked_up_during_the_import(package):
    made, tools = package(__init__=INIT, saw=SAW, hammer=HAMMER + "assert 'saw' in TOOLS\nSAW = TOOLS.create('saw')\n")
    assert tools.names() == ["hammer", "saw"]
    assert isinstance(sys.modules[f"{made}.hammer"].SAW, tools.get("saw"))


def test_a_refused_lookup_does_not_stop_the_import(package):
    careful = "try:\n    TOOLS.names()\nexcept ImportError:\n    refused = True\n"
    made, tools = package(__init__=INIT, saw=SAW + careful, hammer=HAMMER)
    assert tools.names() == ["hammer", "saw"]
    assert sys.modules[f"{made}.saw"].refused


def test_every_lookup_raises_the_packages_own_error(package):
    _, tools = package(__init__=INIT, saw="raise OSError('no teeth')\n", hammer=HAMMER)
    for _ in range(2):
        with pytest.raises(OSError, match="no teeth"):
            tools.get("hammer")


def test_another_thread_waits_for_the_import(package):
    made, tools = package(__init__=INIT, saw=SAW + "import time\ntime.sleep(0.3)\n", hammer=HAMMER)
    first = threading.Thread(target=importlib.import_module, args=(made,))
    first.start()
    while f"{made}.saw" not in sys.modules:
        time.sleep(0.001)
    assert tools.names() == ["hammer", "saw"]
    first.join()


def test_a_name_of_the_package_cannot_be_registered_again(package):
    _, tools = package(__init__=INIT, saw=SAW, hammer=HAMMER)
    with pytest.raises(ParameterError, match=r"'saw' .*\.Saw"):
        tools.register("saw")(type("Mine", (), {}))
    tools.register("plane")(type("Plane", (), {}))
    assert tools.names() == ["hammer", "plane", "saw"]


def test_a_registry_without_a_package_is_filled_by_hand():
    tools = Registry("tool")
    tools.register("saw")(type("Saw", (), {}))
    assert tools.names() == ["saw"] and tools.get("saw").name == "saw"


class Entry:
    """A fake entry point of another distribution."""

    def __init__(self, value, load):
        self.value = value
        self.load = load


def test_plug_ins_come_after_the_package_and_a_bad_one_only_warns(package, monkeypatch, caplog):
    _, tools = package(__init__=INIT, saw=SAW, hammer=HAMMER)
    loads = []

    def plug_in(name):
        loads.append(tools.names())  # a plug-in may look up fedcohort's own entries
        tools.register(name)(type("Theirs", (), {}))

    entries = {
        "fedcohort.tools": [
            Entry("theirs:plane", lambda: plug_in("plane")),
            Entry("theirs:saw", lambda: plug_in("saw")),
        ]
    }
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries[group])
    with caplog.at_level(logging.WARNING, "fedcohort.core.registry"):
        assert tools.names() == ["hammer", "plane", "saw"]
        assert "plane" in tools and tools.get("saw").__name__ == "Saw"
    assert loads == [["hammer", "saw"], ["hammer", "plane", "saw"]]
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["the tool plug-in 'theirs"]


def test_the_registries_name_the_packages_that_fill_them():
    for registry, package in (
        (SELECTORS, "fedcohort.selectors"),
        (FILTERS, "fedcohort.training.filters"),
        (AGGREGATORS, "fedcohort.training.aggregators"),
        (PARTITIONS, "fedcohort.scenario"),
    ):
        assert registry.package == package
        ours = [registry.get(name).__module__ for name in registry]
        assert any(module.startswith(f"{package}.") for module in ours)


def test_importing_fedcohort_leaves_the_selectors_for_later():
    script = (
        "import sys, fedcohort\n"
        "print('fedcohort.selectors' in sys.modules, 'torch' in sys.modules)\n"
        "from fedcohort.core.protocol import SELECTORS\n"
        "print('fedcor' in SELECTORS, 'fedcohort.selectors' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "True", "True", "False"]
