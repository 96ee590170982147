"""The prompt of a benchmark: plain English, so that a real model routes as it does for a user."""

from __future__ import annotations

import numpy as np

from sparseflow.packfile import Manifest
from sparseflow.tokenizer import TOKENIZER_FILE, Tokenizer

TEXT = """\
The ferry to the island leaves at seven in the morning, and whoever misses it has to wait until noon. Nobody in the village
minds that. There is a bakery beside the pier with four tables and a stove, and the woman who owns it has known for thirty years
which of her guests are waiting for a boat and which are hiding from one. She pours the coffee before they ask.

On the island there are two farms, a lighthouse without a keeper, and a weather station that sends nine numbers to the mainland
every hour: the temperature of the air and of the water, the pressure, the wind and where it comes from, the height of the
waves, the rain since midnight, the hours of sun, and the charge of its own battery. When the last of these falls below a third,
somebody has to row out with a new one. It is never the same person, because nobody remembers who went the last time.

How would you plan such a service for a whole coast? Count the stations first, then the days that a battery lasts, then the
people who can row. If forty stations need a visit every ninety days, one boat that reaches three of them in a day is busy for
two weeks of each season, and idle for the rest. That sounds like plenty of time. But the sea decides when it is calm, and in
the months in which batteries empty fastest it seldom is. So the right question is not how many visits there are. It is how
many calm days you can count on, and what you do with the stations that went silent before the next one came.
"""


def bench_prompt(manifest: Manifest, tokens: int) -> tuple[list[int], str]:
    """Ids of a prompt of so many tokens, and where they come from: "text", over and over, or for a model that was packed
    without a tokenizer "random ids", always the same."""
    if (manifest.folder / TOKENIZER_FILE).is_file():
        ids = Tokenizer.from_folder(manifest.folder).encode_plain(TEXT)
        return (ids * -(-tokens // len(ids)))[:tokens], "text"
    return np.random.default_rng(0).integers(0, manifest.geometry.vocab_size, tokens).tolist(), "random ids"
