"""Tests of clients' decisions without a connection: the tests give events and compare effects."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Generator, Iterable
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog.client.cluster.bootstrap import Address
from sparklog.client.cluster.coordinator_search import GROUP, CoordinatorSearch
from sparklog.client.cluster.metadata import Leader
from sparklog.client.cluster.routing_core import (
    ASK_OTHERS_AFTER,
    Ask,
    Connect,
    Disconnect,
    ListOpen,
    NoResponse,
    Prepare,
    Report,
    RoutingCore,
    RoutingSteps,
    WaitUntil,
    next_timeout_s,
)
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import BrokerEndpoint, TopicPartition
from sparklog.protocol.messages import (
    Ack,
    FindCoordinator,
    FindCoordinatorReply,
    InitProducerId,
    Metadata,
    MetadataReply,
    PartitionMetadata,
    Reply,
    TopicMetadata,
    TouchTransaction,
)

T = TypeVar("T")

TP = TopicPartition("t", 0)
STALE = "the broker lacks the current controller's update"
GONE = BrokerError(ErrorCode.NETWORK_EXCEPTION, "gone")


def new_core(
    bootstrap: str = "a:1,b:2", *, brokers: int = 0, turn: int = 0, request_timeout_s: float = 10.0
) -> RoutingCore:
    core = RoutingCore(bootstrap, request_timeout_s=request_timeout_s, roll=lambda: turn / (1 << 16))
    if brokers:
        core.metadata.update(metadata(brokers=brokers))
    return core


def endpoints(count: int) -> tuple[BrokerEndpoint, ...]:
    return tuple(BrokerEndpoint(number, f"host{number}", 9092, 1) for number in range(count))


def metadata(
    *, brokers: int = 2, epoch: int = 1, code: int = 0, leader: int = 0, topics: Iterable[str] = ("t",)
) -> MetadataReply:
    parts = () if code else (PartitionMetadata(0, leader, 0, (0,), (0,)),)
    found = tuple(TopicMetadata(code, name, "" if code else f"id of {name}", parts) for name in topics)
    return MetadataReply(0, "c", epoch, endpoints(brokers), found)


class Script:
    """A driver whose brokers respond as a test says. It records the effects."""

    def __init__(self, core: RoutingCore, *, connected: Iterable[int] = ()) -> None:
        self.core = core
        self.connected = dict.fromkeys(connected, 0.0)
        self.by_address = {Address("a", 1): 0, Address("b", 2): 1}
        self.by_address |= {Address(f"host{number}", 9092): number for number in range(20)}
        #: The brokers that refuse connections.
        self.down: set[int] = set()
        #: The responses by broker; a broker without one sends no response.
        self.replies: dict[int, Reply | BrokerError] = {}
        self.now_s = 100.0
        self.effects: list[object] = []

    def run(self, steps: Generator[Any, Any, T]) -> T:
        self.effects = []
        try:
            effect = next(steps)
            while True:
                self.effects.append(effect)
                try:
                    event = self._perform(effect)
                except BrokerError as error:
                    effect = steps.throw(error)
                else:
                    effect = steps.send(event)
        except StopIteration as done:
            result: T = done.value
            return result

    def _perform(self, effect: object) -> object:
        match effect:
            case ListOpen():
                return dict(self.connected)
            case Connect(address):
                return self._connect(self.by_address[address])
            case Prepare(broker_id):
                if broker_id not in self.down:
                    self._connect(broker_id)
            case Ask(broker_id, _, timeout_s):
                reply = self.replies.get(broker_id)
                if reply is None:
                    raise NoResponse(f"broker {broker_id}", timeout_s)
                if isinstance(reply, BrokerError):
                    raise reply
                return reply
            case Disconnect(broker_id):
                del self.connected[broker_id]
            case WaitUntil(at_s):
                self.now_s = max(self.now_s, at_s)
                return self.now_s
        return None

    def _connect(self, broker_id: int) -> int:
        if broker_id in self.down:
            raise BrokerError(ErrorCode.NETWORK_EXCEPTION, f"broker {broker_id}: refused")
        self.connected[broker_id] = 0.0
        self.core.on_connected(broker_id)
        return broker_id

    def asked(self) -> list[int]:
        return [effect.broker_id for effect in self.effects if isinstance(effect, Ask)]

    def error(self, steps: RoutingSteps[Any]) -> BrokerError:
        with pytest.raises(BrokerError) as caught:
            self.run(steps)
        return caught.value


# --- the choice of a broker ---


@pytest.mark.parametrize(
    ("connected", "turn", "chosen"),
    [
        ({0: 0.0}, 0, 0),
        ({0: 0.0, 1: 0.0}, 1, 1),
        ({0: 0.0, 1: 0.0}, 2, 0),
        ({0: 0.7, 1: 0.0}, 0, 1),  # broker 0 seems to hang
        ({0: 0.7, 1: 0.9}, 1, 1),  # both brokers seem to hang
    ],
)
def test_a_connected_broker_is_chosen(connected: dict[int, float], turn: int, chosen: int) -> None:
    core = new_core(brokers=2, turn=turn)
    script = Script(core)
    script.connected = connected
    assert script.run(core.any_broker()) == chosen
    assert script.effects == [ListOpen()]


@pytest.mark.parametrize(
    ("turn", "down", "tried"),
    [(0, set(), ["a:1"]), (1, set(), ["b:2"]), (0, {0}, ["a:1", "b:2"]), (3, {1}, ["b:2", "a:1"])],
)
def test_bootstrap_addresses_are_tried_in_turn(turn: int, down: set[int], tried: list[str]) -> None:
    core = new_core(turn=turn)
    script = Script(core)
    script.down = down
    script.run(core.any_broker())
    assert script.effects == [ListOpen(), *(Connect(address(text)) for text in tried)]


def address(text: str) -> Address:
    host, port = text.split(":")
    return Address(host, int(port))


def test_known_brokers_are_tried_before_the_bootstrap() -> None:
    core = new_core("c:3", brokers=2)
    script = Script(core)
    script.by_address[Address("c", 3)] = 2
    script.down = {0, 1, 2}
    error = script.error(core.any_broker())
    assert [str(effect.address) for effect in script.effects if isinstance(effect, Connect)] == [
        "host0:9092",
        "host1:9092",
        "c:3",
    ]
    assert error.code == ErrorCode.NETWORK_EXCEPTION
    assert error.detail == "no broker can be reached: broker 0: refused; broker 1: refused; broker 2: refused"


def test_an_address_of_another_cluster_ends_the_search() -> None:
    core = new_core()
    steps = core.any_broker()
    assert next(steps) == ListOpen()
    assert steps.send({}) == Connect(Address("a", 1))
    with pytest.raises(BrokerError, match="another cluster"):
        steps.throw(BrokerError(ErrorCode.INVALID_REQUEST, "another cluster"))


def test_brokers_that_know_no_broker_are_not_enough() -> None:
    core = new_core()
    script = Script(core, connected=[0])
    assert script.run(core.any_broker()) == 0
    core.metadata.update(metadata(brokers=0, epoch=-1, topics=()))
    script.run(core.any_broker())
    assert script.effects == [ListOpen(), Connect(Address("a", 1))]


def test_the_only_connected_broker_is_left_if_it_is_silent() -> None:
    core = new_core()
    script = Script(core)
    script.error(core.ask_any(InitProducerId(0), Ack))
    script.replies = {1: Ack(0)}
    script.run(core.ask_any(InitProducerId(0), Ack))
    assert script.effects == [ListOpen(), Connect(Address("b", 2)), Ask(1, InitProducerId(0), 2.0)]


def test_the_address_of_a_silent_broker_is_tried_last() -> None:
    core = new_core("host1:9092", brokers=3)
    script = Script(core, connected=[1])
    script.error(core.ask_any(InitProducerId(0), Ack))
    script.connected = {}
    script.down = {0, 1, 2}
    script.error(core.any_broker())
    assert [effect.address.host for effect in script.effects if isinstance(effect, Connect)] == [
        "host2",
        "host0",
        "host1",
    ]


def test_a_long_request_has_the_request_timeout() -> None:
    core = new_core(brokers=1)
    script = Script(core, connected=[0])
    script.error(core.ask_any(InitProducerId(0), Ack, is_long=True))
    assert script.effects == [ListOpen(), Ask(0, InitProducerId(0), 10.0)]


def test_repeated_failures_connect_to_another_broker() -> None:
    core = new_core(brokers=3)
    script = Script(core, connected=[0])
    for _ in range(ASK_OTHERS_AFTER - 1):
        core.on_useless()
        assert script.run(core.any_broker()) == 0
    core.on_useless()
    script.run(core.any_broker())
    assert [effect for effect in script.effects if isinstance(effect, Prepare)] == [Prepare(2)]
    core.on_progress()
    script.run(core.any_broker())
    assert script.effects == [ListOpen()]


def test_a_broker_that_cannot_be_connected_does_not_end_the_search() -> None:
    core = new_core(brokers=2)
    script = Script(core, connected=[0])
    script.down = {1}
    for _ in range(ASK_OTHERS_AFTER):
        core.on_useless()
    assert script.run(core.any_broker()) == 0


@given(st.integers(2, 9), st.integers(0, 50), st.data())
def test_each_of_n_silent_brokers_is_asked_within_n_requests(count: int, turn: int, data: st.DataObject) -> None:
    """The same failure may be counted once or twice, by the request and by the call."""
    core = new_core(brokers=count, turn=turn, request_timeout_s=1e9)
    script = Script(core, connected=range(count))
    asked = set()
    for _ in range(count):
        script.error(core.ask_any(InitProducerId(0), Ack))
        asked.update(script.asked())
        if data.draw(st.booleans()):
            core.on_useless()
    assert asked == set(range(count))


@given(st.integers(2, 6), st.integers(0, 50), st.data())
def test_a_useful_broker_is_found_among_others(count: int, turn: int, data: st.DataObject) -> None:
    """The others are down, silent, stale, or do not know the topic. The client is connected to some of them."""
    useful = data.draw(st.integers(0, count - 1))
    core = new_core(brokers=count, turn=turn)
    script = Script(core, connected=data.draw(st.sets(st.integers(0, count - 1))) - {useful})
    for number in set(range(count)) - {useful}:
        state = data.draw(st.sampled_from(["down", "silent", "stale", "slow to know"]))
        if state == "down" and number not in script.connected:
            script.down.add(number)
        elif state == "stale":
            script.replies[number] = metadata(brokers=count, epoch=0, code=3)
        elif state == "slow to know":
            script.replies[number] = metadata(brokers=count, code=3)
    script.replies[useful] = metadata(brokers=count)
    for _ in range(3 * count):
        try:
            script.run(core.fetch_topic("t"))
            break
        except BrokerError as error:
            assert error.retriable
            core.on_useless()
    assert script.asked() == [useful]


# --- requests ---


def test_the_timeout_doubles_up_to_its_limit() -> None:
    assert [next_timeout_s(silences, 6.0) for silences in (0, 1, 2, 3, 1000)] == [1.0, 2.0, 4.0, 6.0, 6.0]


def test_a_silent_broker_is_asked_after_the_others() -> None:
    core = new_core(brokers=2)
    script = Script(core, connected=[0, 1])
    script.replies = {1: Ack(0)}
    error = script.error(core.ask_any(InitProducerId(0), Ack))
    assert isinstance(error, NoResponse)
    assert error.detail == "broker 0: no response within 1 s"
    for _ in range(5):
        script.run(core.ask_any(InitProducerId(0), Ack))
        assert script.asked() == [1]
    assert 0 in script.connected, "the broker may only be busy"


def test_a_response_restores_trust_and_the_first_timeout() -> None:
    core = new_core(brokers=1)
    script = Script(core, connected=[0])
    waits = []
    for response in (None, None, Ack(0), None):
        script.replies = {0: response} if response else {}
        with contextlib.suppress(NoResponse):
            script.run(core.ask_any(InitProducerId(0), Ack))
        waits += [effect.timeout_s for effect in script.effects if isinstance(effect, Ask)]
    assert waits == [1.0, 2.0, 4.0, 1.0]


def test_a_connection_without_response_for_the_request_timeout_is_closed() -> None:
    core = new_core(brokers=1)
    script = Script(core, connected=[0])
    for _ in range(5):
        script.error(core.ask_any(InitProducerId(0), Ack))
    assert script.effects[-2:] == [Ask(0, InitProducerId(0), 10.0), Disconnect(0)]


def test_a_response_of_another_type_closes_the_connection() -> None:
    core = new_core(brokers=1)
    script = Script(core, connected=[0])
    script.replies = {0: Ack(0)}
    error = script.error(core.ask_any(Metadata(0), MetadataReply))
    assert str(error) == "INVALID_REQUEST: broker 0 responded to Metadata with Ack"
    assert script.connected == {}


def test_an_error_of_a_silent_broker_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(NoResponse("host:1", 1.0)))
    assert (type(error), error.code, error.detail) == (
        BrokerError,
        ErrorCode.NETWORK_EXCEPTION,
        "host:1: no response within 1 s",
    )


# --- metadata ---


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (metadata(), None),
        (metadata(code=3), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        (metadata(code=17), ErrorCode.INVALID_TOPIC_EXCEPTION),
        (metadata(topics=()), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        (metadata(code=3, epoch=0), ErrorCode.BROKER_NOT_AVAILABLE),  # it does not have the controller's update
        (metadata(code=17, epoch=0), ErrorCode.INVALID_TOPIC_EXCEPTION),
    ],
)
def test_a_response_describes_a_topic(reply: MetadataReply, code: ErrorCode | None) -> None:
    core = new_core()
    core.metadata.update(metadata(topics=()))
    script = Script(core, connected=[0])
    script.replies = {0: reply}
    if code is None:
        assert script.run(core.fetch_topic("t")).name == "t"
    else:
        assert script.error(core.fetch_topic("t")).code == code


def test_a_broker_without_the_controllers_update_is_asked_last() -> None:
    core = new_core(brokers=2)
    script = Script(core, connected=[0])
    script.replies = {0: metadata(epoch=0), 1: metadata()}
    script.run(core.refresh(("t",)))
    script.run(core.refresh(("t",)))
    assert script.asked() == [1]
    assert Prepare(1) in script.effects


def test_a_known_leader_needs_no_request() -> None:
    core = new_core(brokers=1)
    script = Script(core)
    assert script.run(core.leader(TP, refresh=False)) == Leader(0, 0)
    assert script.effects == []


@pytest.mark.parametrize(
    ("tp", "leader", "code"),
    [
        (TP, -1, ErrorCode.LEADER_NOT_AVAILABLE),
        (TopicPartition("t", 1), 0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    ],
)
def test_a_missing_leader_is_explained(tp: TopicPartition, leader: int, code: ErrorCode) -> None:
    core = new_core()
    script = Script(core, connected=[0])
    script.replies = {0: metadata(leader=leader)}
    assert script.error(core.leader(tp, refresh=False)).code == code


def test_wanted_topics_are_requested_with_growing_delays() -> None:
    core = new_core(brokers=1)
    script = Script(core, connected=[0])
    script.replies = {0: metadata(brokers=1)}
    waits = []
    for _ in range(6):
        core.wanted.add("t")
        began_s = script.now_s
        script.run(core.refresh_wanted())
        waits.append(round(script.now_s - began_s, 3))
        assert script.effects[-1] == Report("")
        assert not core.wanted
    assert waits == [0.0, 0.04, 0.08, 0.16, 0.16, 0.16], "the delay less 20 % jitter"
    core.on_progress()
    core.wanted.add("t")
    began_s = script.now_s
    script.run(core.refresh_wanted())
    assert round(script.now_s - began_s, 3) == 0.02


def test_wanted_topics_are_requested_until_a_broker_responds() -> None:
    core = new_core(brokers=2)
    script = Script(core, connected=[0, 1])
    script.replies = {0: GONE, 1: metadata(topics=("t", "u"))}
    core.wanted.update(["u", "t"])
    script.run(core.refresh_wanted())
    assert [effect for effect in script.effects if isinstance(effect, Ask | Report)] == [
        Ask(0, Metadata(0, ("t", "u")), 1.0),
        Report("NETWORK_EXCEPTION: gone"),
        Ask(1, Metadata(0, ("t", "u")), 1.0),
        Report(""),
    ]


@pytest.mark.parametrize(
    ("reply", "errors", "problem"),
    [
        (metadata(code=3), {"t": 3}, ""),
        (
            metadata(code=3, epoch=0),
            {},
            f"BROKER_NOT_AVAILABLE: {STALE}: topic 't'",
        ),
        (BrokerError(ErrorCode.UNSUPPORTED_VERSION, "old"), {"t": 35}, "UNSUPPORTED_VERSION: old"),
        (metadata(), {}, ""),
    ],
)
def test_errors_of_wanted_topics_are_noted(
    reply: MetadataReply | BrokerError, errors: dict[str, int], problem: str
) -> None:
    core = new_core()
    core.metadata.update(metadata(topics=()))
    script = Script(core, connected=[0])
    script.replies = {0: reply}
    version = core.metadata.version
    core.wanted.add("t")
    script.run(core.refresh_wanted())
    assert {name: topic.code for name, topic in core.topic_errors.items()} == errors
    assert script.effects[-1] == Report(problem)
    assert core.metadata.version > version
    assert not core.wanted


# --- coordinators ---


def test_a_coordinator_is_found_connected_and_cached() -> None:
    core = new_core()
    script = Script(core, connected=[0])
    search = CoordinatorSearch(core, GROUP, "g")
    script.replies = {0: FindCoordinatorReply(0, endpoints(8)[7], 0), 7: Ack(0)}
    request = TouchTransaction(0, "g", "run")
    script.run(search.ask(request, Ack, timeout_s=3.0))
    assert [effect for effect in script.effects if effect != ListOpen()] == [
        Ask(0, FindCoordinator(0, GROUP, "g"), 1.0),
        Connect(Address("host7", 9092)),
        Ask(7, request, 3.0),
    ]
    script.run(search.ask(request, Ack, timeout_s=3.0))
    assert script.effects == [ListOpen(), Ask(7, request, 3.0)]


@pytest.mark.parametrize(
    ("code", "found_again"),
    [
        (ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, False),
        (ErrorCode.CONCURRENT_TRANSACTIONS, False),
        (ErrorCode.NOT_COORDINATOR, True),
        (ErrorCode.COORDINATOR_NOT_AVAILABLE, True),
        (ErrorCode.NETWORK_EXCEPTION, True),
        (ErrorCode.BROKER_STOPPING, True),
    ],
)
def test_only_some_errors_start_a_new_search(code: ErrorCode, found_again: bool) -> None:
    core = new_core()
    script = Script(core, connected=[0])
    search = CoordinatorSearch(core, GROUP, "g")
    script.replies = {0: FindCoordinatorReply(0, endpoints(8)[7], 0), 7: BrokerError(code)}
    for _ in range(2):
        assert script.error(search.ask(TouchTransaction(0, "g", "run"), Ack)).code == code
    assert (0 in script.asked()) == found_again


def test_a_reused_address_is_not_mistaken_for_the_coordinator() -> None:
    core = new_core()
    script = Script(core, connected=[0])
    script.by_address[Address("host7", 9092)] = 3
    search = CoordinatorSearch(core, GROUP, "g")
    script.replies = {0: FindCoordinatorReply(0, endpoints(8)[7], 0), 3: Ack(0)}
    error = script.error(search.ask(TouchTransaction(0, "g", "run"), Ack))
    assert str(error) == "BROKER_NOT_AVAILABLE: host7:9092 is broker 3; expected 7"
    assert script.asked() == [0]
