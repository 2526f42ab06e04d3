"""`hsfmt capture`: prompts through a serving engine into a dataset."""

from __future__ import annotations

import time
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from hsfmt.catalog import read_header
from hsfmt.cli import units
from hsfmt.cli.capture_prompts import MASKS, HubChat, PromptFile
from hsfmt.cli.capture_run import CaptureRun, RunOptions, Tally
from hsfmt.cli.capture_servers import find_server
from hsfmt.cli.failures import dumps, one_line
from hsfmt.cli.options import json_option, quiet_option
from hsfmt.cli.storage_options import dataset_argument, storage_option
from hsfmt.cli.termination import sigterm_interrupts
from hsfmt.errors import NotFoundError, UsageError
from hsfmt.idset import CommittedIds
from hsfmt.sealing import seal as seal_dataset
from hsfmt.storage import Store

_PROGRESS_SECONDS = 10.0
_SHOWN = 10


@click.command()
@click.argument("prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@dataset_argument
@click.option(
    "--server", required=True, metavar="URL", help="The server: SGLang with hsfmt's plugin, or vLLM with its connector."
)
@click.option(
    "--tokenizer", metavar="MODEL", help="Model whose chat template and tokenizer turn conversations into tokens."
)
@click.option(
    "--mask",
    type=click.Choice(MASKS),
    default="assistant",
    show_default=True,
    help="What a conversation's loss mask marks: all assistant turns, the last one, or no mask is given.",
)
@click.option("--max-tokens", type=click.IntRange(1), metavar="N", help="Longer prompts are left out, and counted.")
@click.option(
    "--concurrency",
    type=click.IntRange(1, 4096),
    default=32,
    show_default=True,
    metavar="N",
    help="Prompts at the server at once.",
)
@click.option(
    "--tries",
    type=click.IntRange(1, 100),
    default=6,
    show_default=True,
    metavar="N",
    help="Times that a prompt is sent while the server has no answer or no room.",
)
@click.option("--api-key", envvar="HSFMT_API_KEY", default="", help="Key of the server. [env: HSFMT_API_KEY]")
@click.option(
    "--seal/--no-seal", default=True, show_default=True, help="Seal the dataset when all of the file is in it."
)
@storage_option
@json_option
@quiet_option
def command(  # noqa: PLR0913  one parameter an option
    *,
    prompts: Path,
    store: Store,
    server: str,
    tokenizer: str | None,
    mask: str,
    max_tokens: int | None,
    concurrency: int,
    tries: int,
    api_key: str,
    seal: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Send the prompts of the JSONL file PROMPTS to a server that captures into the dataset URL.

    A line has token ids (input_ids, prompt_token_ids or token_ids, and perhaps loss_mask) or a conversation (messages,
    or ShareGPT's conversations); id and metadata are kept. What is in the dataset already is not sent, so that a run
    that ended early is started again as it was. Exit code 1: a line is not in the dataset in the end.
    """
    file = PromptFile(prompts, HubChat(tokenizer) if tokenizer else None, mask, max_tokens)
    n_lines = file.count()
    if not n_lines:
        raise UsageError.at(str(prompts), expected="prompts", got="an empty file")
    shown = _Progress(n_lines, shown=not quiet)
    run = CaptureRun(
        find_server(server, api_key), _Durable(store), RunOptions(concurrency=concurrency, tries=tries), shown.update
    )
    try:
        with sigterm_interrupts():
            run.run(file)
    except BaseException:
        if not as_json:  # there the error is the document
            _report(run.tally, store.url, as_json=False, seconds=shown.seconds)
        raise
    _report(run.tally, store.url, as_json=as_json, seconds=shown.seconds)
    complete = not run.tally.failed and not run.tally.bad
    if seal and complete:
        sealed = _seal(store)
        if not as_json:
            click.echo(f"sealed      {sealed}")
    if not complete:
        raise click.exceptions.Exit(1)


class _Durable:
    """The ids in a dataset that may not be there yet."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ids: CommittedIds | None = None

    def __call__(self) -> AbstractSet[str]:
        if self._ids is None:
            with suppress(NotFoundError):
                self._ids = CommittedIds(self._store, read_header(self._store))
        if self._ids is None:
            return frozenset()
        self._ids.refresh()
        return self._ids


class _Progress:
    """A line on stderr every ten seconds."""

    def __init__(self, n_lines: int, *, shown: bool) -> None:
        self._n_lines, self._shown_at = n_lines, time.monotonic() if shown else float("inf")
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def update(self, tally: Tally) -> None:
        """Print a line if the last one is old."""
        now = time.monotonic()
        if now - self._shown_at < _PROGRESS_SECONDS:
            return
        self._shown_at = now
        settled = tally.present + tally.repeated + len(tally.bad)
        done = min(settled + tally.answered, self._n_lines)  # some are sent twice
        left = (
            f", {units.seconds((self._n_lines - done) / tally.answered * self.seconds)} left" if tally.answered else ""
        )
        click.echo(
            f"capture: {done:,} of {self._n_lines:,} lines, {tally.durable:,} samples durable, "
            f"{tally.answered_tokens / self.seconds:,.0f} tokens/s{left}",
            err=True,
        )


def _seal(store: Store) -> str:
    snapshot = seal_dataset(store).snapshot
    return f"{snapshot.n_samples:,} samples, {snapshot.fingerprint}"


def _report(tally: Tally, url: str, *, as_json: bool, seconds: float) -> None:
    document: dict[str, Any] = {
        "url": url, "lines": tally.lines, "present": tally.present, "repeated": tally.repeated,
        "durable": tally.durable, "tokens": tally.tokens, "retries": tally.retries, "seconds": round(seconds, 1),
        "bad": {str(number + 1): reason for number, reason in tally.bad.items()}, "failed": tally.failed,
    }  # fmt: skip
    if as_json:
        click.echo(dumps(document))
        return
    reasons = tally.reasons.most_common()
    rows = [
        ("dataset", url),
        ("lines", f"{tally.lines:,}"),
        ("captured", f"{units.counted(tally.durable, 'sample')} of {units.counted(tally.tokens, 'token')}, durable"),
        ("there before", f"{tally.present:,}"),
        ("same id", f"{tally.repeated:,}"),
        ("no prompts", f"{len(tally.bad):,}"),
        ("failed", f"{len(tally.failed):,}" + "".join(f"; {n:,} {why}" for why, n in reasons)),
        (
            "took",
            f"{units.seconds(seconds)}, {tally.tokens / max(seconds, 1e-9):,.0f} tokens/s, {tally.retries:,} retries",
        ),
    ]
    click.echo(units.aligned(rows))
    found = [f"line {number + 1}: {reason}" for number, reason in tally.bad.items()]
    found += [f"{sample_id}: {reason}" for sample_id, reason in tally.failed.items()]
    for text in found[:_SHOWN]:
        click.echo(f"  {one_line(text)[:300]}", err=True)
    if len(found) > _SHOWN:
        click.echo(f"  and {len(found) - _SHOWN:,} more; --json lists all", err=True)
