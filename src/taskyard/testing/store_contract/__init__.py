"""What every store must do, sentence by sentence of `taskyard.ports.store`. See `taskyard.testing.contract`."""

from taskyard.testing.store_contract.adds import AddContract
from taskyard.testing.store_contract.asking import AskingContract
from taskyard.testing.store_contract.attempts import AttemptContract
from taskyard.testing.store_contract.audit import AuditContract
from taskyard.testing.store_contract.blockers import BlockerContract, LaneContract
from taskyard.testing.store_contract.catalogue import CatalogueContract
from taskyard.testing.store_contract.claims import ClaimContract
from taskyard.testing.store_contract.commands import CommandContract
from taskyard.testing.store_contract.control import ControlContract
from taskyard.testing.store_contract.dedupe import DedupeContract
from taskyard.testing.store_contract.dependencies import DependencyContract, LineContract
from taskyard.testing.store_contract.details import DetailContract
from taskyard.testing.store_contract.devices import DeviceContract, DurableDeviceContract
from taskyard.testing.store_contract.due import DueContract
from taskyard.testing.store_contract.durable import DurableContract
from taskyard.testing.store_contract.events import EventContract
from taskyard.testing.store_contract.failures import FailureContract
from taskyard.testing.store_contract.forecasts import ForecastContract
from taskyard.testing.store_contract.key_idle import KeyIdleContract
from taskyard.testing.store_contract.keys import KeyContract
from taskyard.testing.store_contract.nodes import NodeContract
from taskyard.testing.store_contract.orders import OrderContract
from taskyard.testing.store_contract.prompt import PromptContract
from taskyard.testing.store_contract.reading import ReadingContract
from taskyard.testing.store_contract.scenes import SceneContract, TiedSceneContract
from taskyard.testing.store_contract.schedules import ScheduleContract
from taskyard.testing.store_contract.settles import SettleContract


class StoreContract(
    AddContract,
    DueContract,
    ClaimContract,
    KeyContract,
    SettleContract,
    CommandContract,
    AskingContract,
    ControlContract,
    OrderContract,
    BlockerContract,
    LaneContract,
    NodeContract,
    CatalogueContract,
    AuditContract,
    EventContract,
    DetailContract,
    AttemptContract,
    ReadingContract,
    FailureContract,
    SceneContract,
    ForecastContract,
):
    """Subclass it and write `make_store`; set `ring` if your store keeps another number of events."""


class PromptStoreContract(StoreContract, PromptContract):
    """The same, and a submit is answered on the spot."""


class DurableStoreContract(StoreContract, DurableContract):
    """The same, and everything is still there when the store is closed and opened again."""


class TiesContract(DedupeContract, KeyIdleContract, DependencyContract, LineContract, TiedSceneContract):
    """Tasks that have to do with others: dedupe by scope and by window, dependencies, groups."""


__all__ = [
    "DeviceContract",
    "DurableDeviceContract",
    "DurableStoreContract",
    "PromptStoreContract",
    "ScheduleContract",
    "StoreContract",
    "TiesContract",
]
