"""What a card costs an hour that was bought rather than rented."""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import msgspec

from pannier.runtime.errors import ConfigError

HOURS_A_YEAR = 8766


class Card(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A card's price and power; `usd_per_hour` instead of both where it is rented."""

    name: str
    usd: float | None = None
    watts: float | None = None
    usd_per_hour: float | None = None
    source: str = ""


class Prices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cards, how many years they serve, and what a kilowatt hour costs: data/purchase.json, or a user's file."""

    years: float
    usd_per_kwh: float
    cards: list[Card]
    note: str = ""
    kwh_source: str = ""

    def hourly(self) -> Mapping[str, float]:
        """Dollars an hour by card: price / years, and power, always on. Raises `ConfigError`."""
        return {card.name: self._hourly(card) for card in self.cards}

    def _hourly(self, card: Card) -> float:
        if card.usd_per_hour is not None:
            return card.usd_per_hour
        if card.usd is None or card.watts is None:
            raise ConfigError(f"{card.name} needs usd_per_hour, or usd and watts")
        return card.usd / (self.years * HOURS_A_YEAR) + card.watts / 1000 * self.usd_per_kwh


def read_prices(path: Path | None = None) -> Prices:
    """A file, or what comes with Pannier. Raises `ConfigError`."""
    source = files("pannier.planner") / "data" / "purchase.json" if path is None else path
    try:
        return msgspec.json.decode(source.read_bytes(), type=Prices)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from error
