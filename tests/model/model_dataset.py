"""A dataset as it should be: dicts of numpy arrays, and the rules of the format applied to them by hand."""

import struct
from dataclasses import dataclass, field

import numpy as np
import xxhash

LAYERS, HIDDEN = (1, 4), 3


@dataclass(frozen=True)
class Sample:
    """What was handed to a writer."""

    sample_id: str
    source_index: int
    seed: int
    n_tokens: int

    def arrays(self):
        """Return (token ids, states, mask), the same ones every time."""
        rng = np.random.default_rng([self.seed, self.n_tokens])
        states = rng.standard_normal((self.n_tokens, len(LAYERS), HIDDEN), np.float32)
        return rng.integers(0, 9999, self.n_tokens), states, rng.integers(0, 2, self.n_tokens).astype(np.uint8)

    def content(self):
        """Return the content digest, from the prose of rule DIG-3."""
        ids, states, mask = self.arrays()
        text = b"hsfmt:sample:1\0float32\0" + struct.pack("<3Q", self.n_tokens, len(LAYERS), HIDDEN)
        text += b"".join(int(number).to_bytes(8, "little", signed=True) for number in ids)
        text += bytes(mask.tolist()) + struct.pack(f"<{states.size}f", *states.ravel().tolist())
        return xxhash.xxh3_128(text).digest()


def dataset_digest(samples):
    """Return the content digest of samples, from the prose of rule DIG-6."""
    keys = []
    for sample in samples:
        name = sample.sample_id.encode()
        keys.append(
            xxhash.xxh3_128(b"hsfmt:pair:1\0" + struct.pack("<Q", len(name)) + name + sample.content()).digest()
        )
    text = b"hsfmt:dataset:1\0" + struct.pack("<Q", len(keys)) + b"".join(sorted(keys))
    return f"xxh3_128:{xxhash.xxh3_128(text).hexdigest()}"


@dataclass
class Part:
    """What a part holds."""

    samples: list[Sample] = field(default_factory=list)
    holes: dict[str, str] = field(default_factory=dict)


@dataclass
class Model:
    """What is committed, retracted and attached; superseded parts are committed too, and count no more."""

    parts: dict[str, Part] = field(default_factory=dict)
    superseded: set[str] = field(default_factory=set)
    retracted: set[str] = field(default_factory=set)
    attachments: dict[str, list[int]] = field(default_factory=dict)

    def copies(self):
        """Return every committed sample, by id, the one that counts first."""
        found = {}
        for _, part in sorted(self.parts.items()):
            for sample in part.samples:
                found.setdefault(sample.sample_id, []).append(sample)
        return found

    def served(self, retracted=None):
        """Return the samples that a snapshot of all this serves, in its order."""
        gone = self.retracted if retracted is None else retracted
        firsts = [copies[0] for sample_id, copies in self.copies().items() if sample_id not in gone]
        return sorted(firsts, key=lambda sample: (sample.source_index, sample.sample_id.encode()))

    def counts(self):
        """Return the counts of a snapshot of all this."""
        copies, served = self.copies(), self.served()
        return {
            "samples": len(served),
            "tokens": sum(sample.n_tokens for sample in served),
            "supervised_tokens": sum(int(sample.arrays()[2].sum()) for sample in served),
            "parts": len(self.parts),
            "holes": len({name for part in self.parts.values() for name in part.holes} - set(copies)),
            "shadowed": sum(len(found) - 1 for sample_id, found in copies.items()),
            "retracted": len(self.retracted & set(copies)),
        }
