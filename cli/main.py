"""The command `hsfmt`: its subcommands are imported when they run, and every error becomes an exit code."""

from __future__ import annotations

import logging
import os
import select
import sys
from importlib import import_module
from typing import Any

import click

import hsfmt
from hsfmt.cli.failures import BROKEN_PIPE, as_json, exit_code, show
from hsfmt.cli.termination import no_interruption_is_lost
from hsfmt.versions import FORMAT

_COMMANDS = {
    "doctor": "Say what a folder of another program holds, and what convert would do with it.",
    "estimate": "Say how large a dataset will be.",
    "convert": "Turn a folder that another program wrote into a dataset.",
    "verify": "Check a dataset and report everything that is wrong with it.",
    "info": "Say what a dataset holds and means.",
    "ls": "List the samples of a dataset, or its holes.",
    "seal": "Make all that is committed the dataset's current snapshot.",
    "repair": "Keep what can be proven of a damaged dataset, and say what is lost.",
    "compact": "Make few parts of many.",
    "retract": "Serve some samples no longer; their data stays.",
    "gc": "Remove what no snapshot and no part needs any more: the only command that deletes.",
    "merge": "Put the parts of several datasets into one, without writing them anew.",
    "push": "Make another place hold the same dataset: what it lacks is copied.",
    "pull": "Bring a dataset here from another place.",
    "card": "Write the card of a dataset for the Hub.",
    "export": "Write a dataset in the format of another program.",
    "cache": "Look at, clear or fill the local cache of remote datasets.",
    "cat": "Show one sample, or write it to a .pt, .safetensors or .npz file.",
    "capture": "Send prompts to a server that captures into a dataset.",
    "speculators-train": "Train a drafter with speculators on a dataset.",
    "specforge-train": "Train a drafter with SpecForge on a dataset.",
}
# Those whose module is not named as they are.
_MODULES = {"estimate": "estimate_command"}
_EPILOG = (
    "Exit codes: 0 fine, 1 problems in the data, 2 usage or bad input, 3 not found or storage failure, "
    "130 interrupted, 143 terminated. With --json, stdout is one JSON document in every case."
)


class CommandLine(click.Group):
    """A group that imports a command's module when it is needed, and ends with the package's exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  click passes it by name
        """Return the names, in the order of a dataset's life."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  likewise
        """Import the command's module."""
        if cmd_name not in _COMMANDS:
            return None
        module = _MODULES.get(cmd_name, cmd_name.replace("-", "_"))
        command: click.Command = import_module(f"hsfmt.cli.{module}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  likewise
        """Write the list of commands without importing one of them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; a reader of ours that went away (`| head`) is no error to talk about."""
        try:
            with no_interruption_is_lost():
                result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            if not _reader_is_gone():
                raise
            # What is still buffered has nowhere to go, and Python would complain about it at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise click.exceptions.Exit(BROKEN_PIPE) from None
        return result

    def main(self, args: Any = None, prog_name: str | None = None, **extra: Any) -> Any:  # type: ignore[override]
        """Run the command line; ends the process unless `standalone_mode=False`."""
        args = sys.argv[1:] if args is None else list(args)
        extra.setdefault("obj", args)
        if not extra.pop("standalone_mode", True):
            return super().main(args, prog_name, standalone_mode=False, **extra)
        try:
            code = super().main(args, prog_name, standalone_mode=False, **extra)
        except Exception as error:  # noqa: BLE001  whatever it is, it ends as a message and an exit code
            show(error)
            if "--json" in args:
                click.echo(as_json(error))
            code = exit_code(error)
        sys.exit(code if isinstance(code, int) else 0)


def _reader_is_gone() -> bool:
    """Say whether it is stdout's pipe that broke, not a connection of a storage."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


@click.group(
    cls=CommandLine, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(hsfmt.__version__, prog_name="hsfmt", message=f"%(prog)s %(version)s (format {FORMAT})")
def main() -> None:
    """Datasets of multi-layer LLM hidden states: convert, check, look at, seal."""
    # The commands report by themselves; without a handler, Python would print the package's warnings once more.
    logging.getLogger("hsfmt").addHandler(logging.NullHandler())
    # gcsfs and azure-identity would print what a failure is made of that is an error of ours, too.
    logging.getLogger("gcsfs").addHandler(logging.NullHandler())
    logging.getLogger("azure").addHandler(logging.NullHandler())


if __name__ == "__main__":
    main(prog_name="hsfmt")
