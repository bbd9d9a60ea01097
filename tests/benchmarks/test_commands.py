"""Every benchmark that `scripts/bench` lists can be started."""

import importlib

import pytest

from scripts.benchmarks.__main__ import COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_describes_its_options(name, capsys):
    module = importlib.import_module(f"scripts.benchmarks.{name.replace('-', '_')}")
    with pytest.raises(SystemExit) as stopped:
        module.main(["--help"])
    assert stopped.value.code == 0
    assert f"scripts/bench {name}" in capsys.readouterr().out
