"""What users write of devices and accounts: `AdbDevice(3, serial="emulator-5554")`, `GameAccount(7)`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from taskyard.errors import InvalidInput
from taskyard.model.device import DeviceSpec, account_key
from taskyard.model.given import check_count, check_labels, check_name
from taskyard.ports.device import DeviceAdapter

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic_core import CoreSchema


@dataclass(frozen=True)
class GameAccount:
    """The account that a task is done for. Of the tasks of one account one runs at a time, on whatever device. `data`
    is what else its consumers need, as JSON. Where an account is an argument, its id alone will do."""

    account_id: int | str
    name: str = ""
    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.account_id, bool) or not isinstance(self.account_id, int | str):
            raise InvalidInput("must be a whole number or a text", field="account_id", given=self.account_id)
        check_name("account_id", str(self.account_id))
        check_name("account_id", self.key)

    @property
    def key(self) -> str:
        """The key of its tasks."""
        return account_key(self.account_id)

    @classmethod
    def of(cls, given: AccountId) -> GameAccount:
        """The account with this id, or the account itself."""
        return given if isinstance(given, GameAccount) else cls(given)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(_read_bare, handler(source))

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        whole = handler(schema)
        if handler.mode == "serialization":
            return whole
        return {"anyOf": [{"type": "integer"}, {"type": "string"}, whole]}


AccountId = int | str | GameAccount


def _read_bare(given: Any) -> Any:
    """The fields of an account of which there is only the id. Pydantic would take True for 1, and 7.0 for 7."""
    found = given.get("account_id") if isinstance(given, Mapping) else given
    if isinstance(found, bool | float):
        raise ValueError("the id of an account is a whole number or a text")
    return {"account_id": given} if isinstance(given, int | str) else given


class DeviceDefinition(ABC):
    """A device as a program defines it, and how to reach it. `number` is its `emulator_id`."""

    adapter: ClassVar[str]
    """The name of this kind, by which a device that is in a store is reached."""

    def __init__(self, number: int, *, name: str = "", labels: Mapping[str, str] | None = None, host: str = "") -> None:
        self.number = check_count("number", number, least=0)
        self.name = check_name("the name of a device", name or f"{self.adapter}-{number}")
        self.labels = check_labels(labels or {})
        self.host = host and check_name("host", host)

    @property
    def address(self) -> str:
        """Where it is, unique among devices of its kind; empty if that says nothing."""
        return ""

    @property
    def settings(self) -> dict[str, Any]:
        """What `from_spec` needs beside the rest, as JSON."""
        return {}

    @property
    def restart_app_s(self) -> float:
        """Seconds that its adapter may need to restart the app; 0 if that says nothing."""
        return 0.0

    @property
    def restart_s(self) -> float:
        """Seconds that its adapter may need to restart the device; 0 if that says nothing."""
        return 0.0

    def spec(self, pool: str) -> DeviceSpec:
        """What a store keeps of it."""
        return DeviceSpec(
            pool=pool,
            name=self.name,
            number=self.number,
            adapter=self.adapter,
            address=self.address,
            settings=self.settings,
            labels=self.labels,
            host=self.host,
            from_code=True,
        )

    @classmethod
    @abstractmethod
    def from_spec(cls, spec: DeviceSpec) -> DeviceDefinition:
        """The definition of a device that is in a store; `InvalidInput` if its settings make no sense."""

    @abstractmethod
    def make_adapter(self) -> DeviceAdapter:
        """A connection to it, not yet connected. Called on the event loop that it will belong to."""
