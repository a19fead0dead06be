"""`draftloop collect-env` and `draftloop completion`: about the installation rather than a model."""

from __future__ import annotations

import json as json_
from enum import StrEnum

from cyclopts import App

from draftloop.cli.options import FLAG


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def add_about(app: App) -> None:
    """Give the program its commands about itself."""
    app.command(collect_env)

    @app.command
    def completion(shell: Shell, /) -> None:
        """Print the script that completes commands and options in a shell.

        Bash: draftloop completion bash > ~/.local/share/bash-completion/completions/draftloop

        Parameters
        ----------
        shell:
            bash, zsh or fish.
        """
        print(app.generate_completion(shell=shell.value))


def collect_env(*, json: FLAG = False) -> None:
    """Versions, GPU, driver, environment variables, and what the engine would choose here: for reports of faults.

    Parameters
    ----------
    json:
        Print one JSON object instead.
    """
    from draftloop.bench.environment import as_text, collect

    found = collect()
    print(json_.dumps(found, indent=1) if json else as_text(found))
