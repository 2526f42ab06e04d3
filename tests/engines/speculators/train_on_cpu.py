"""The real trainer of speculators on a machine without an accelerator: train_on_cpu.py HOW ARGUMENTS.

HOW is `file` (speculators alone), `hsfmt` (our launcher) or `dataset` (our Dataset under their loaders and trainer).
Only where tensors are put is changed; data, collation, sampling, model, loss and optimizer are the real ones.
"""

import sys

import torch


def to_the_cpu() -> None:
    from speculators.train import trainer

    torch.accelerator.synchronize = lambda *_, **__: None
    trainer.get_local_rank = lambda: torch.device("cpu")
    trainer.Trainer.device_type = property(lambda _: "cpu", lambda *_: None)


def with_our_dataset() -> None:
    """Give the trainer loaders over our Dataset, made by its own function."""
    from speculators.train import cli
    from speculators.train.dataloader import _setup_dataloader

    from hsfmt.readers.speculators import SpeculatorsDataset

    def loaders(*, total_seq_len, hidden_states_dtype, hidden_size, num_target_layers, train_data_ratio, **options):
        rest = {name: options[name] for name in ("num_workers", "prefetch_factor", "preprocess")}
        rest |= {"hidden_size": hidden_size, "num_target_layers": num_target_layers}
        return tuple(
            _setup_dataloader(
                SpeculatorsDataset(
                    options["transfer"].dataset.reader.store.url,
                    max_len=total_seq_len,
                    split=split,
                    train_ratio=train_data_ratio,
                    hidden_states_dtype=hidden_states_dtype,
                ),
                total_seq_len,
                **rest,
                **({"seed": options["seed"]} if split == "train" else {}),
            )
            for split in ("train", "val")
        )

    cli.create_train_val_loaders = loaders


def main(how: str, arguments: list[str]) -> None:
    if how == "file":
        to_the_cpu()
        from speculators.train.cli import main as train
        from speculators.train.config import TrainConfig

        train(TrainConfig.resolve(arguments))
        return
    from hsfmt.cli.main import main as hsfmt
    from hsfmt.readers.speculators import register

    register()
    to_the_cpu()
    if how == "dataset":
        with_our_dataset()
    hsfmt(["speculators-train", *arguments])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
