"""Right programs on whole files of unittest and pytest."""

from __future__ import annotations

from .cases import Case, case

RIGHT_UNIT_TESTS: tuple[Case, ...] = (
    case(
        "mailer is called once for each user",
        "mocks",
        "send_all",
        """
        import unittest
        from unittest.mock import Mock, call

        class SendAllTest(unittest.TestCase):
            def test_calls(self):
                mailer = Mock()
                send_all(mailer, ["ann", "bob"], "hi")
                self.assertEqual(mailer.send.call_count, 2)
                mailer.send.assert_has_calls([call("ann", text="hi"), call("bob", text="hi")])

            def test_nobody(self):
                mailer = Mock()
                send_all(mailer, [], "hi")
                mailer.send.assert_not_called()
        """,
        """
        def send_all(mailer, users, text):
            for user in users:
                mailer.send(user, text=text)
        """,
        """
        def send_all(mailer, users, text):
            mailer.send(users, text=text)
        """,
    ),
    case(
        "side effects of a repository",
        "mocks",
        "load_user",
        """
        from unittest.mock import MagicMock
        import pytest

        def test_retries_once():
            repo = MagicMock()
            repo.get.side_effect = [TimeoutError("slow"), {"id": 3}]
            assert load_user(repo, 3) == {"id": 3}
            assert repo.get.call_args_list[1].args == (3,)

        def test_gives_up():
            repo = MagicMock()
            repo.get.side_effect = TimeoutError("slow")
            with pytest.raises(TimeoutError):
                load_user(repo, 3)
            assert repo.get.call_count == 2
        """,
        """
        def load_user(repository, number):
            try:
                return repository.get(number)
            except TimeoutError:
                return repository.get(number)
        """,
        """
        def load_user(repository, number):
            return repository.get(number)
        """,
    ),
    case(
        "mock with a specification",
        "mocks",
        "Thermostat",
        """
        import unittest
        from unittest.mock import Mock, create_autospec

        class Heater:
            def on(self): ...
            def off(self): ...
            def set_power(self, watts): ...

        class ThermostatTest(unittest.TestCase):
            def setUp(self):
                self.heater = Mock(spec=Heater)
                self.thermostat = Thermostat(self.heater, target=20)

            def test_cold(self):
                self.thermostat.update(15)
                self.heater.on.assert_called_once_with()
                self.heater.off.assert_not_called()

            def test_warm(self):
                self.thermostat.update(25)
                self.heater.off.assert_called_once()

            def test_power_of_autospec(self):
                heater = create_autospec(Heater, instance=True)
                Thermostat(heater, 20).boost(900)
                heater.set_power.assert_called_once_with(900)
        """,
        """
        class Thermostat:
            def __init__(self, heater, target):
                self.heater, self.target = heater, target

            def update(self, degrees):
                (self.heater.on if degrees < self.target else self.heater.off)()

            def boost(self, watts):
                self.heater.set_power(watts)
        """,
        """
        class Thermostat:
            def __init__(self, heater, target):
                self.heater, self.target = heater, target

            def update(self, degrees):
                self.heater.on()
                self.heater.off()

            def boost(self, watts):
                self.heater.set_power(watts)
        """,
    ),
    case(
        "magic mock as a container and a context",
        "mocks",
        "first_line",
        """
        from unittest.mock import MagicMock

        def test_context():
            source = MagicMock()
            source.open.return_value.__enter__.return_value = ["a\\n", "b\\n"]
            assert first_line(source) == "a"
            source.open.assert_called_once_with("r")
            source.open.return_value.__exit__.assert_called_once()
        """,
        """
        def first_line(source):
            with source.open("r") as lines:
                return next(iter(lines)).strip()
        """,
        """
        def first_line(source):
            return next(iter(source.open("r").__enter__())).strip()
        """,
    ),
    case(
        "callback mock with arguments",
        "mocks",
        "download",
        """
        from unittest.mock import ANY, Mock

        def test_progress():
            progress = Mock()
            assert download(["a", "b"], progress) == 2
            assert [c.args for c in progress.call_args_list] == [(1, 2), (2, 2)]

        def test_result_of_callback_stops():
            progress = Mock(return_value="stop")
            assert download(["a", "b"], progress) == 1
            progress.assert_called_once_with(ANY, 2)
        """,
        """
        def download(items, progress):
            for i, _ in enumerate(items, 1):
                if progress(i, len(items)) == "stop":
                    return i
            return len(items)
        """,
        """
        def download(items, progress):
            for i, _ in enumerate(items, 1):
                progress(i, len(items))
            return len(items)
        """,
    ),
    case(
        "service with two collaborators",
        "mocks",
        "Checkout",
        """
        import unittest
        from unittest import mock

        class CheckoutTest(unittest.TestCase):
            def test_pays_and_logs_in_this_order(self):
                parent = mock.Mock()
                parent.gateway.charge.return_value = "tx1"
                checkout = Checkout(parent.gateway, parent.log)
                self.assertEqual(checkout.pay(30), "tx1")
                self.assertEqual(
                    parent.mock_calls,
                    [mock.call.gateway.charge(30), mock.call.log("paid", id="tx1")],
                )

            def test_failure(self):
                gateway = mock.Mock(**{"charge.side_effect": OSError})
                log = mock.Mock()
                self.assertIsNone(Checkout(gateway, log).pay(1))
                log.assert_called_once_with("failed")
        """,
        """
        class Checkout:
            def __init__(self, gateway, log):
                self.gateway, self.log = gateway, log

            def pay(self, amount):
                try:
                    number = self.gateway.charge(amount)
                except OSError:
                    self.log("failed")
                    return None
                self.log("paid", id=number)
                return number
        """,
        """
        class Checkout:
            def __init__(self, gateway, log):
                self.gateway, self.log = gateway, log

            def pay(self, amount):
                self.log("paid", id="tx1")
                return self.gateway.charge(amount)
        """,
    ),
    case(
        "input is patched by a decorator",
        "patches",
        "ask_age",
        """
        import unittest
        from unittest.mock import patch

        class AskAgeTest(unittest.TestCase):
            @patch("builtins.input", side_effect=["x", "-3", "41"])
            def test_asks_until_valid(self, mocked):
                self.assertEqual(ask_age(), 41)
                self.assertEqual(mocked.call_count, 3)

            @patch("builtins.input", return_value="7")
            def test_prompt(self, mocked):
                ask_age()
                mocked.assert_called_once_with("Age: ")
        """,
        """
        def ask_age():
            while True:
                text = input("Age: ")
                if text.isdigit():
                    return int(text)
        """,
        """
        def ask_age():
            return int(input("Age: "))
        """,
    ),
    case(
        "open is patched with mock_open",
        "patches",
        "read_config",
        """
        from unittest.mock import mock_open, patch

        def test_lines():
            with patch("builtins.open", mock_open(read_data="a=1\\n# no\\nb=2\\n")) as m:
                assert read_config("c.ini") == {"a": "1", "b": "2"}
            m.assert_called_once_with("c.ini")
        """,
        """
        def read_config(path):
            with open(path) as f:
                lines = [line.strip() for line in f.read().splitlines()]
            return dict(line.split("=") for line in lines if line and line[0] != "#")
        """,
        """
        def read_config(path):
            with open(path) as f:
                return dict(line.split("=") for line in f.read().splitlines())
        """,
    ),
    case(
        "clock is patched",
        "patches",
        "Stopwatch",
        """
        import time
        import unittest
        from unittest.mock import patch

        class StopwatchTest(unittest.TestCase):
            def test_elapsed(self):
                with patch("time.time", side_effect=[100.0, 102.5]):
                    w = Stopwatch()
                    w.start()
                    self.assertEqual(w.stop(), 2.5)

            @patch("time.sleep")
            def test_wait(self, sleep):
                Stopwatch().wait(3600)
                sleep.assert_called_once_with(3600)
        """,
        """
        import time

        class Stopwatch:
            def start(self):
                self._began = time.time()

            def stop(self):
                return time.time() - self._began

            def wait(self, seconds):
                time.sleep(seconds)
        """,
        """
        import time

        class Stopwatch:
            def start(self):
                self._began = time.time()

            def stop(self):
                return self._began

            def wait(self, seconds):
                pass
        """,
    ),
    case(
        "random choice is patched",
        "patches",
        "describe_servers",
        """
        from unittest.mock import patch

        @patch("random.choice")
        def test_greeting(choice):
            choice.return_value = "Ahoy"
            assert describe_servers("Ann") == "Ahoy, Ann!"
            assert choice.call_args.args[0] == ["Hello", "Hi", "Ahoy"]

        @patch("random.choice", lambda xs: xs[0])
        def test_first():
            assert describe_servers("Bo") == "Hello, Bo!"
        """,
        """
        import random

        def describe_servers(name):
            return f"{random.choice(['Hello', 'Hi', 'Ahoy'])}, {name}!"
        """,
        """
        import random

        def describe_servers(name):
            return f"Hello, {name}!"
        """,
    ),
    case(
        "print is patched",
        "patches",
        "countdown",
        """
        import unittest
        from unittest.mock import call, patch

        class CountdownTest(unittest.TestCase):
            @patch("builtins.print")
            def test_prints(self, out):
                countdown(2)
                self.assertEqual(out.mock_calls, [call(2), call(1), call("liftoff")])
        """,
        """
        def countdown(n):
            for i in range(n, 0, -1):
                print(i)
            print("liftoff")
        """,
        """
        def countdown(n):
            for i in range(n):
                print(i)
            print("liftoff")
        """,
    ),
    case(
        "function of the module is patched",
        "patches",
        ("fetch", "title_of"),
        """
        from unittest.mock import patch
        import solution

        def test_title():
            with patch("solution.fetch", return_value="<title>Hi</title>") as f:
                assert solution.title_of("http://x") == "Hi"
            f.assert_called_once_with("http://x")

        def test_object():
            with patch.object(solution, "fetch", lambda url: f"<title>{url}</title>"):
                assert solution.title_of("u") == "u"
        """,
        """
        import re

        def fetch(url):
            raise OSError("no network")

        def title_of(url):
            return re.search("<title>(.*)</title>", fetch(url)).group(1)
        """,
        """
        def fetch(url):
            raise OSError("no network")

        def title_of(url):
            return "Hi"
        """,
    ),
    case(
        "method of a class is patched",
        "patches",
        "Weather",
        """
        import unittest
        from unittest.mock import patch, PropertyMock

        class WeatherTest(unittest.TestCase):
            def test_advice(self):
                with patch.object(Weather, "temperature", return_value=-5) as t:
                    self.assertEqual(Weather("Oslo").advice(), "coat")
                    t.assert_called_once_with()

            def test_city(self):
                with patch.object(Weather, "city", new_callable=PropertyMock) as city:
                    city.return_value = "Rome"
                    self.assertEqual(Weather("Oslo").label(), "Weather in Rome")
        """,
        """
        class Weather:
            def __init__(self, city):
                self._city = city

            @property
            def city(self):
                return self._city

            def temperature(self):
                raise NotImplementedError

            def advice(self):
                return "coat" if self.temperature() < 10 else "shirt"

            def label(self):
                return f"Weather in {self.city}"
        """,
    ),
    case(
        "dictionary is patched",
        "patches",
        ("PRICES", "price"),
        """
        from unittest.mock import patch
        import solution

        @patch.dict("solution.PRICES", {"tea": 3})
        def test_patched():
            assert solution.price("tea") == 3
            assert solution.price("coffee") == 2

        def test_restored():
            assert "tea" not in solution.PRICES
            assert solution.price("tea") is None
        """,
        """
        PRICES = {"coffee": 2}

        def price(name):
            return PRICES.get(name)
        """,
        """
        PRICES = {"coffee": 2, "tea": 3}

        def price(name):
            return PRICES.get(name)
        """,
    ),
    case(
        "deprecated function warns",
        "warnings and logs",
        "old_sum",
        """
        import unittest
        import warnings

        class OldSumTest(unittest.TestCase):
            def test_warns(self):
                with self.assertWarns(DeprecationWarning) as caught:
                    self.assertEqual(old_sum(1, 2), 3)
                self.assertIn("new_sum", str(caught.warning))

            def test_record(self):
                with warnings.catch_warnings(record=True) as w:
                    warnings.simplefilter("always")
                    old_sum(1, 1)
                self.assertEqual([x.category for x in w], [DeprecationWarning])
        """,
        """
        import warnings

        def old_sum(a, b):
            warnings.warn("use new_sum", DeprecationWarning, stacklevel=2)
            return a + b
        """,
        """
        def old_sum(a, b):
            return a + b
        """,
    ),
    case(
        "warning as a pattern",
        "warnings and logs",
        "set_speed",
        """
        import unittest
        import warnings

        class SpeedTest(unittest.TestCase):
            def test_clamped(self):
                with self.assertWarnsRegex(UserWarning, r"clamped to \\d+"):
                    self.assertEqual(set_speed(500), 100)

            def test_silent(self):
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    self.assertEqual(set_speed(50), 50)
        """,
        """
        import warnings

        def set_speed(n):
            if n > 100:
                warnings.warn("clamped to 100")
                return 100
            return n
        """,
        """
        import warnings

        def set_speed(n):
            warnings.warn("clamped to 100")
            return min(n, 100)
        """,
    ),
    case(
        "pytest.warns and deprecations",
        "warnings and logs",
        "fahrenheit",
        """
        import pytest

        def test_warns():
            with pytest.warns(RuntimeWarning, match="absolute zero"):
                fahrenheit(-300)

        def test_value(recwarn):
            assert fahrenheit(100) == 212
            assert len(recwarn) == 0
        """,
        """
        import warnings

        def fahrenheit(celsius):
            if celsius < -273.15:
                warnings.warn("below absolute zero", RuntimeWarning)
            return celsius * 9 / 5 + 32
        """,
        """
        def fahrenheit(celsius):
            return celsius * 9 / 5 + 32
        """,
    ),
    case(
        "logger of the program",
        "warnings and logs",
        "process",
        """
        import logging
        import unittest

        class ProcessTest(unittest.TestCase):
            def test_error_is_logged(self):
                with self.assertLogs("worker", level="ERROR") as logs:
                    self.assertEqual(process(["1", "x"]), [1])
                self.assertEqual(logs.output, ["ERROR:worker:bad item 'x'"])
                self.assertEqual(logs.records[0].levelno, logging.ERROR)

            def test_quiet(self):
                with self.assertNoLogs("worker", level="WARNING"):
                    process(["1"])
        """,
        """
        import logging

        log = logging.getLogger("worker")

        def process(items):
            out = []
            for item in items:
                try:
                    out.append(int(item))
                except ValueError:
                    log.error("bad item %r", item)
            return out
        """,
        """
        import logging

        log = logging.getLogger("worker")

        def process(items):
            log.error("bad item 'x'")
            return [int(i) for i in items if i.isdigit()]
        """,
    ),
    case(
        "caplog of pytest",
        "warnings and logs",
        "connect",
        """
        import logging

        def test_levels(caplog):
            with caplog.at_level(logging.INFO):
                assert connect("db", tries=2) is False
            assert [r.levelname for r in caplog.records] == ["INFO", "INFO", "WARNING"]
            assert "gave up on db" in caplog.text
        """,
        """
        import logging

        def connect(name, tries):
            for i in range(tries):
                logging.info("try %d", i)
            logging.warning("gave up on %s", name)
            return False
        """,
        """
        import logging

        def connect(name, tries):
            logging.info("try")
            return False
        """,
    ),
    case(
        "handler of the test collects records",
        "warnings and logs",
        "audit",
        """
        import logging

        def test_handler():
            records = []

            class Keep(logging.Handler):
                def emit(self, record):
                    records.append(record.getMessage())

            logger = logging.getLogger("audit")
            handler = Keep()
            logger.addHandler(handler)
            logger.setLevel(logging.DEBUG)
            try:
                audit("ann", "login")
            finally:
                logger.removeHandler(handler)
            assert records == ["ann: login"]
        """,
        """
        import logging

        def audit(user, action):
            logging.getLogger("audit").debug("%s: %s", user, action)
        """,
        """
        def audit(user, action):
            print(f"{user}: {action}")
        """,
    ),
    case(
        "regular expressions of error texts",
        "unittest",
        "parse_date",
        """
        import unittest
        from datetime import date

        class ParseDateTest(unittest.TestCase):
            def test_good(self):
                self.assertEqual(parse_date("2024-05-06"), date(2024, 5, 6))

            def test_bad(self):
                with self.assertRaisesRegex(ValueError, "^not a date: 'x+'$"):
                    parse_date("xxx")
                self.assertRaisesRegex(ValueError, "not a date", parse_date, "2024-13-01")

            def test_type(self):
                with self.assertRaises(TypeError):
                    parse_date(None)
        """,
        """
        from datetime import date

        def parse_date(text):
            try:
                return date.fromisoformat(text)
            except ValueError:
                raise ValueError(f"not a date: {text!r}") from None
        """,
        """
        from datetime import date

        def parse_date(text):
            return date.fromisoformat(text)
        """,
    ),
    case(
        "subtests of many rows",
        "unittest",
        "to_roman",
        """
        import unittest

        class RomanTest(unittest.TestCase):
            KNOWN = {1: "I", 4: "IV", 9: "IX", 40: "XL", 1994: "MCMXCIV"}

            def test_known(self):
                for number, numeral in self.KNOWN.items():
                    with self.subTest(number=number):
                        self.assertEqual(to_roman(number), numeral)

            def test_lengths(self):
                for n in range(1, 20):
                    with self.subTest(msg="length", n=n):
                        self.assertLessEqual(len(to_roman(n)), 5)
        """,
        """
        def to_roman(n):
            table = [(1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"),
                     (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")]
            out = ""
            for value, sign in table:
                out += sign * (n // value)
                n %= value
            return out
        """,
        """
        def to_roman(n):
            return "I" * n
        """,
    ),
    case(
        "set-up and tear-down of class and method",
        "unittest",
        "Database",
        """
        import unittest

        class DatabaseTest(unittest.TestCase):
            @classmethod
            def setUpClass(cls):
                cls.db = Database(":memory:")
                cls.db.create("users")

            @classmethod
            def tearDownClass(cls):
                cls.db.close()
                assert cls.db.closed

            def setUp(self):
                self.db.insert("users", {"id": 1})
                self.addCleanup(self.db.clear, "users")

            def test_count(self):
                self.assertEqual(self.db.count("users"), 1)

            def test_count_again(self):
                self.db.insert("users", {"id": 2})
                self.assertEqual(self.db.count("users"), 2)

            def test_find(self):
                self.assertDictEqual(self.db.find("users", id=1), {"id": 1})
                self.assertIsNone(self.db.find("users", id=9))
        """,
        """
        class Database:
            def __init__(self, url):
                self.url, self.tables, self.closed = url, {}, False

            def create(self, table):
                self.tables[table] = []

            def insert(self, table, row):
                self.tables[table].append(row)

            def clear(self, table):
                self.tables[table].clear()

            def count(self, table):
                return len(self.tables[table])

            def find(self, table, **where):
                for row in self.tables[table]:
                    if where.items() <= row.items():
                        return row

            def close(self):
                self.closed = True
        """,
        """
        class Database:
            def __init__(self, url):
                self.url, self.tables, self.closed = url, {}, False

            def create(self, table):
                self.tables[table] = []

            def insert(self, table, row):
                self.tables[table].append(row)

            def clear(self, table):
                pass

            def count(self, table):
                return len(self.tables[table])

            def find(self, table, **where):
                return None

            def close(self):
                self.closed = True
        """,
    ),
    case(
        "skipped and expected failures",
        "unittest",
        "isqrt",
        """
        import sys
        import unittest

        class IsqrtTest(unittest.TestCase):
            def test_small(self):
                self.assertListEqual([isqrt(n) for n in range(6)], [0, 1, 1, 1, 2, 2])

            @unittest.skipIf(sys.version_info < (3, 0), "needs Python 3")
            def test_big(self):
                self.assertEqual(isqrt(10**40), 10**20)

            @unittest.skip("too slow")
            def test_huge(self):
                self.assertEqual(isqrt(10**4000), 0)

            @unittest.expectedFailure
            def test_known_limit(self):
                self.assertEqual(isqrt(2), 1.414)

            def test_skipped_inside(self):
                self.skipTest("later")
        """,
        """
        def isqrt(n):
            x = n
            while x * x > n:
                x = (x + n // x) // 2
            return x
        """,
        """
        def isqrt(n):
            return int(n / 2)
        """,
    ),
    case(
        "all kinds of assert methods",
        "unittest",
        "stats",
        """
        import unittest

        class StatsTest(unittest.TestCase):
            def setUp(self):
                self.s = stats([2, 4, 4, 6])

            def test_methods(self):
                self.assertAlmostEqual(self.s["mean"], 4.0, places=7)
                self.assertGreater(self.s["max"], self.s["min"])
                self.assertIn("mode", self.s)
                self.assertNotIn("sum", self.s)
                self.assertIsInstance(self.s, dict)
                self.assertCountEqual(self.s, ["max", "min", "mean", "mode"])
                self.assertTupleEqual((self.s["min"], self.s["max"]), (2, 6))
                self.assertRegex(str(self.s["mode"]), r"^4$")
                self.assertTrue(self.s["mean"] == 4, "mean")
                self.assertFalse(stats([]))
                self.assertNotEqual(self.s, {})
        """,
        """
        def stats(xs):
            if not xs:
                return {}
            return {"min": min(xs), "max": max(xs), "mean": sum(xs) / len(xs),
                    "mode": max(xs, key=xs.count)}
        """,
    ),
    case(
        "shared base class of test cases",
        "unittest",
        ("ListStack", "DictStack"),
        """
        import unittest

        class Common:
            def make(self):
                raise NotImplementedError

            def test_order(self):
                s = self.make()
                s.push(1)
                s.push(2)
                self.assertEqual([s.pop(), s.pop()], [2, 1])

            def test_empty(self):
                self.assertRaises(IndexError, self.make().pop)

        class ListStackTest(Common, unittest.TestCase):
            make = staticmethod(lambda: ListStack())

        class DictStackTest(Common, unittest.TestCase):
            def make(self):
                return DictStack()
        """,
        """
        class ListStack:
            def __init__(self):
                self._items = []

            def push(self, x):
                self._items.append(x)

            def pop(self):
                return self._items.pop()

        class DictStack:
            def __init__(self):
                self._items = {}

            def push(self, x):
                self._items[len(self._items)] = x

            def pop(self):
                if not self._items:
                    raise IndexError("empty")
                return self._items.pop(len(self._items) - 1)
        """,
        """
        class ListStack:
            def __init__(self):
                self._items = []

            def push(self, x):
                self._items.append(x)

            def pop(self):
                return self._items.pop()

        class DictStack(ListStack):
            def pop(self):
                return self._items.pop(0)
        """,
    ),
    case(
        "exception of assertRaises is examined",
        "unittest",
        ("Inventory", "OutOfStock"),
        """
        import unittest
        from solution import Inventory, OutOfStock

        class InventoryTest(unittest.TestCase):
            def test_out_of_stock(self):
                inventory = Inventory({"pen": 2})
                with self.assertRaises(OutOfStock) as cm:
                    inventory.take("pen", 5)
                self.assertEqual(cm.exception.item, "pen")
                self.assertEqual(cm.exception.available, 2)
                self.assertEqual(inventory.stock, {"pen": 2})

        if __name__ == "__main__":
            unittest.main()
        """,
        """
        class OutOfStock(Exception):
            def __init__(self, item, available):
                super().__init__(f"only {available} of {item}")
                self.item, self.available = item, available

        class Inventory:
            def __init__(self, stock):
                self.stock = dict(stock)

            def take(self, item, n):
                if self.stock.get(item, 0) < n:
                    raise OutOfStock(item, self.stock.get(item, 0))
                self.stock[item] -= n
        """,
        """
        class OutOfStock(Exception):
            item = available = None

        class Inventory:
            def __init__(self, stock):
                self.stock = dict(stock)

            def take(self, item, n):
                self.stock[item] -= n
                if self.stock[item] < 0:
                    raise OutOfStock
        """,
    ),
    case(
        "printed table is captured",
        "output",
        "print_table",
        """
        def test_table(capsys):
            print_table([("a", 1), ("bb", 22)])
            captured = capsys.readouterr()
            assert captured.out == "a    1\\nbb  22\\n"
            assert captured.err == ""
        """,
        """
        def print_table(rows):
            for name, n in rows:
                print(f"{name:<3}{n:>3}")
        """,
        """
        def print_table(rows):
            for name, n in rows:
                print(name, n)
        """,
    ),
    case(
        "output is redirected",
        "output",
        "fizzbuzz",
        """
        import io
        import unittest
        from contextlib import redirect_stdout

        class FizzBuzzTest(unittest.TestCase):
            def test_prints(self):
                out = io.StringIO()
                with redirect_stdout(out):
                    result = fizzbuzz(5)
                self.assertIsNone(result)
                self.assertEqual(out.getvalue().split(), ["1", "2", "Fizz", "4", "Buzz"])
        """,
        """
        def fizzbuzz(n):
            for i in range(1, n + 1):
                print("Fizz" * (i % 3 == 0) + "Buzz" * (i % 5 == 0) or i)
        """,
        """
        def fizzbuzz(n):
            for i in range(1, n + 1):
                print(i)
        """,
    ),
    case(
        "sys.stdout is replaced by hand",
        "output",
        "hello",
        """
        import io
        import sys

        def test_hello():
            saved, sys.stdout = sys.stdout, io.StringIO()
            try:
                hello("Ann")
                text = sys.stdout.getvalue()
            finally:
                sys.stdout = saved
            assert text == "Hello, Ann!\\n"
        """,
        """
        def hello(name):
            print(f"Hello, {name}!")
        """,
        """
        def hello(name):
            return f"Hello, {name}!"
        """,
    ),
    case(
        "errors go to the standard error stream",
        "output",
        "warn",
        """
        def test_streams(capsys):
            assert warn("disk full", 3) == 3
            out, err = capsys.readouterr()
            assert out == ""
            assert err.strip() == "warning: disk full"
            warn("again", 0)
            assert "again" in capsys.readouterr().err
        """,
        """
        import sys

        def warn(text, status):
            print("warning:", text, file=sys.stderr)
            return status
        """,
        """
        def warn(text, status):
            print("warning:", text)
            return status
        """,
    ),
    case(
        "patched standard output of a class",
        "output",
        "Logger",
        """
        import unittest
        from io import StringIO
        from unittest.mock import patch

        class LoggerTest(unittest.TestCase):
            @patch("sys.stdout", new_callable=StringIO)
            def test_levels(self, out):
                log = Logger(level=2)
                log.write(1, "hidden")
                log.write(2, "seen")
                self.assertEqual(out.getvalue(), "[2] seen\\n")

            def test_own_stream(self):
                stream = StringIO()
                Logger(level=0, stream=stream).write(1, "x")
                self.assertEqual(stream.getvalue(), "[1] x\\n")
        """,
        """
        class Logger:
            def __init__(self, level, stream=None):
                self.level, self.stream = level, stream

            def write(self, level, text):
                if level >= self.level:
                    print(f"[{level}] {text}", file=self.stream)
        """,
        """
        class Logger:
            def __init__(self, level, stream=None):
                self.level = level

            def write(self, level, text):
                print(f"[{level}] {text}")
        """,
    ),
    case(
        "input is replaced by monkeypatch",
        "input and environment",
        "guess",
        """
        def test_guess(monkeypatch, capsys):
            answers = iter(["5", "9", "7"])
            monkeypatch.setattr("builtins.input", lambda prompt="": next(answers))
            assert guess(7) == 3
            assert capsys.readouterr().out.split() == ["higher", "lower", "yes"]
        """,
        """
        def guess(secret):
            tries = 0
            while True:
                tries += 1
                n = int(input("? "))
                if n == secret:
                    print("yes")
                    return tries
                print("higher" if n < secret else "lower")
        """,
        """
        def guess(secret):
            return 1 if int(input("? ")) == secret else 3
        """,
    ),
    case(
        "standard input is a text",
        "input and environment",
        "sum_lines",
        """
        import io
        import sys

        def test_sum(monkeypatch):
            monkeypatch.setattr(sys, "stdin", io.StringIO("1\\n2\\n\\n3\\n"))
            assert sum_lines() == 6

        def test_empty(monkeypatch):
            monkeypatch.setattr("sys.stdin", io.StringIO(""))
            assert sum_lines() == 0
        """,
        """
        import sys

        def sum_lines():
            return sum(int(line) for line in sys.stdin if line.strip())
        """,
        """
        import sys

        def sum_lines():
            return sum(int(c) for c in sys.stdin.readline().split())
        """,
    ),
    case(
        "arguments of the command line",
        "input and environment",
        "main",
        """
        import sys
        import unittest
        from unittest.mock import patch

        class MainTest(unittest.TestCase):
            def test_arguments(self):
                with patch.object(sys, "argv", ["prog", "--times", "2", "ha"]):
                    self.assertEqual(main(), "haha")

            def test_given(self):
                self.assertEqual(main(["x"]), "x")

            def test_wrong(self):
                with self.assertRaises(SystemExit) as cm:
                    main(["--times"])
                self.assertEqual(cm.exception.code, 2)
        """,
        """
        import argparse

        def main(argv=None):
            parser = argparse.ArgumentParser()
            parser.add_argument("word")
            parser.add_argument("--times", type=int, default=1)
            arguments = parser.parse_args(argv)
            return arguments.word * arguments.times
        """,
        """
        def main(argv=("prog", "--times", "2", "ha")):
            if argv[-1] == "--times":
                raise SystemExit(1)
            return argv[-1] * 2 if len(argv) > 1 else argv[0]
        """,
    ),
    case(
        "environment variables",
        "input and environment",
        "database_url",
        """
        import os
        import pytest

        def test_default(monkeypatch):
            monkeypatch.delenv("DB_URL", raising=False)
            assert database_url() == "sqlite://"

        def test_set(monkeypatch):
            monkeypatch.setenv("DB_URL", "pg://x")
            assert database_url() == "pg://x"
            assert os.environ["DB_URL"] == "pg://x"

        def test_written(monkeypatch):
            monkeypatch.setenv("DB_URL", "first")
            database_url(save="second")
            assert os.environ["DB_URL"] == "second"
        """,
        """
        import os

        def database_url(save=None):
            if save:
                os.environ["DB_URL"] = save
            return os.environ.get("DB_URL", "sqlite://")
        """,
        """
        import os

        URL = os.environ.get("DB_URL", "sqlite://")

        def database_url(save=None):
            return URL
        """,
    ),
    case(
        "working folder and home",
        "input and environment",
        "config_path",
        """
        import os
        from unittest import mock

        def test_home():
            with mock.patch.dict(os.environ, {"APP_HOME": "/srv/app"}):
                assert config_path("a.ini") == "/srv/app/a.ini"

        def test_working_folder(monkeypatch, tmp_path):
            monkeypatch.delenv("APP_HOME", raising=False)
            monkeypatch.chdir(tmp_path)
            assert config_path("b.ini") == str(tmp_path / "b.ini")
        """,
        """
        import os

        def config_path(name):
            return os.path.join(os.environ.get("APP_HOME") or os.getcwd(), name)
        """,
        """
        def config_path(name):
            return "/srv/app/" + name
        """,
    ),
    case(
        "attribute of the module by monkeypatch",
        "input and environment",
        ("RATE", "net"),
        """
        import solution

        def test_rate(monkeypatch):
            monkeypatch.setattr(solution, "RATE", 0.5)
            assert solution.net(100) == 50

        def test_original():
            assert solution.net(100) == 80
        """,
        """
        RATE = 0.2

        def net(gross):
            return gross * (1 - RATE)
        """,
        """
        RATE = 0.2

        def net(gross, rate=RATE):
            return gross * (1 - rate)
        """,
    ),
    case(
        "folder of the test is put on the path",
        "file of the test",
        "add",
        """
        import os
        import sys

        sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
        sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))

        from solution import add

        def test_add():
            assert add(2, 3) == 5
            assert add("a", "b") == "ab"
        """,
        """
        def add(a, b):
            return a + b
        """,
        """
        def add(a, b):
            return int(a) + int(b)
        """,
    ),
    case(
        "data beside the test",
        "file of the test",
        "read_numbers",
        """
        from pathlib import Path

        HERE = Path(__file__).resolve().parent
        DATA = HERE / "numbers.txt"

        def setup_module(module):
            DATA.write_text("1 2\\n3\\n")

        def teardown_module(module):
            DATA.unlink()

        def test_numbers():
            assert read_numbers(DATA) == [1, 2, 3]
        """,
        """
        def read_numbers(path):
            return [int(word) for word in path.read_text().split()]
        """,
        """
        def read_numbers(path):
            return [int(word) for word in path.read_text().splitlines()]
        """,
    ),
    case(
        "name of the test's own file",
        "file of the test",
        "module_name",
        """
        import os

        def test_own():
            assert module_name("/a/b/tool.py") == "tool"
            own = module_name(__file__)
            assert own + ".py" == os.path.basename(__file__)
            assert own == __name__.rpartition(".")[2] or own
        """,
        """
        import os

        def module_name(path):
            return os.path.splitext(os.path.basename(path))[0]
        """,
        """
        def module_name(path):
            return path.split("/")[2]
        """,
    ),
    case(
        "main of the test is run by pytest",
        "file of the test",
        "is_leap",
        """
        import pytest
        import solution

        def test_years():
            assert solution.is_leap(2000)
            assert not solution.is_leap(1900)
            assert [y for y in range(2001, 2010) if solution.is_leap(y)] == [2004, 2008]

        if __name__ == "__main__":
            pytest.main(["-v", __file__])
        """,
        """
        def is_leap(y):
            return y % 4 == 0 and (y % 100 != 0 or y % 400 == 0)
        """,
        """
        def is_leap(y):
            return y % 4 == 0
        """,
    ),
    case(
        "module imported with another name",
        "file of the test",
        ("area", "perimeter"),
        """
        import importlib
        import unittest

        import solution as geometry

        class GeometryTest(unittest.TestCase):
            def test_area(self):
                self.assertEqual(geometry.area(2, 3), 6)
                self.assertEqual(geometry.perimeter(2, 3), 10)

            def test_module(self):
                self.assertIs(importlib.import_module("solution").area, geometry.area)
                self.assertTrue(hasattr(geometry, "perimeter"))
                self.assertFalse(hasattr(geometry, "volume"))
        """,
        """
        def area(a, b):
            return a * b

        def perimeter(a, b):
            return 2 * (a + b)
        """,
        """
        def area(a, b):
            return a * b

        def perimeter(a, b):
            return a + b
        """,
    ),
    case(
        "fixture of examples",
        "fixtures",
        "is_palindrome",
        """
        import pytest

        @pytest.fixture
        def palindromes():
            return ["level", "A man, a plan", ""]

        @pytest.fixture(scope="module")
        def others():
            return ["ab", "hello"]

        def test_yes(palindromes):
            assert is_palindrome(palindromes[0]) and is_palindrome(palindromes[2])

        def test_no(others):
            assert not any(map(is_palindrome, others))
        """,
        """
        def is_palindrome(text):
            letters = [c.lower() for c in text if c.isalpha()]
            return letters == letters[::-1]
        """,
        """
        def is_palindrome(text):
            return len(text) % 2 == 1 or not text
        """,
    ),
    case(
        "fixture yields an object and closes it",
        "fixtures",
        "Channel",
        """
        import pytest

        @pytest.fixture
        def channel():
            c = Channel("news")
            c.open()
            yield c
            c.close()
            assert c.is_closed

        def test_send(channel):
            channel.send("a")
            assert channel.sent == ["a"]

        def test_fresh(channel):
            assert channel.sent == []

        def test_closed():
            with pytest.raises(RuntimeError):
                Channel("x").send("y")
        """,
        """
        class Channel:
            def __init__(self, name):
                self.name, self.sent, self.is_closed = name, [], True

            def open(self):
                self.is_closed = False

            def close(self):
                self.is_closed = True

            def send(self, text):
                if self.is_closed:
                    raise RuntimeError("closed")
                self.sent.append(text)
        """,
        """
        class Channel:
            sent = []
            is_closed = True

            def __init__(self, name):
                self.name = name

            def open(self):
                self.is_closed = False

            def close(self):
                self.is_closed = True

            def send(self, text):
                self.sent.append(text)
        """,
    ),
    case(
        "fixture with parameters",
        "fixtures",
        "Codec",
        """
        import pytest

        @pytest.fixture(params=["", "abc", "Hello, World!"])
        def text(request):
            return request.param

        @pytest.fixture(params=[1, 13, 25], ids=lambda n: f"shift{n}")
        def codec(request):
            return Codec(request.param)

        def test_round_trip(codec, text):
            assert codec.decode(codec.encode(text)) == text

        def test_changes(codec):
            assert codec.encode("abc") != "abc"
        """,
        """
        class Codec:
            def __init__(self, shift):
                self.shift = shift

            def _move(self, text, k):
                return "".join(
                    chr((ord(c) - 97 + k) % 26 + 97) if "a" <= c <= "z" else c for c in text
                )

            def encode(self, text):
                return self._move(text, self.shift)

            def decode(self, text):
                return self._move(text, -self.shift)
        """,
        """
        class Codec:
            def __init__(self, shift):
                self.shift = shift

            def encode(self, text):
                return "".join(chr(ord(c) + self.shift) for c in text)

            def decode(self, text):
                return "".join(chr(ord(c) - 1) for c in text)
        """,
    ),
    case(
        "fixtures use fixtures",
        "fixtures",
        ("Library", "Book"),
        """
        import pytest
        from solution import Book, Library

        @pytest.fixture
        def books():
            return [Book("Dune", 1965), Book("Emma", 1815)]

        @pytest.fixture
        def library(books):
            lib = Library()
            for b in books:
                lib.add(b)
            return lib

        def test_count(library, books):
            assert len(library) == len(books) == 2

        def test_oldest(library, books):
            assert library.oldest() is books[1]

        class TestSearch:
            @pytest.fixture(autouse=True)
            def prepare(self, library):
                self.found = library.search("un")

            def test_found(self):
                assert [b.title for b in self.found] == ["Dune"]
        """,
        """
        class Book:
            def __init__(self, title, year):
                self.title, self.year = title, year

        class Library:
            def __init__(self):
                self._books = []

            def add(self, book):
                self._books.append(book)

            def __len__(self):
                return len(self._books)

            def oldest(self):
                return min(self._books, key=lambda b: b.year)

            def search(self, text):
                return [b for b in self._books if text in b.title]
        """,
        """
        class Book:
            def __init__(self, title, year):
                self.title, self.year = title, year

        class Library:
            def __init__(self):
                self._books = []

            def add(self, book):
                self._books.append(book)

            def __len__(self):
                return 2

            def oldest(self):
                return self._books[0]

            def search(self, text):
                return self._books
        """,
    ),
    case(
        "fixture is a factory",
        "fixtures",
        "total_price",
        """
        import pytest

        @pytest.fixture
        def make_order():
            made = []

            def make(*prices, discount=0):
                order = {"prices": list(prices), "discount": discount}
                made.append(order)
                return order

            yield make
            assert made

        def test_plain(make_order):
            assert total_price(make_order(10, 20)) == 30

        def test_discount(make_order):
            assert total_price(make_order(10, 10, discount=0.5)) == pytest.approx(10)

        def test_nothing(make_order):
            assert total_price(make_order()) == 0
        """,
        """
        def total_price(order):
            return sum(order["prices"]) * (1 - order["discount"])
        """,
        """
        def total_price(order):
            return sum(order["prices"])
        """,
    ),
    case(
        "set-up methods of pytest",
        "fixtures",
        "Tape",
        """
        class TestTape:
            @classmethod
            def setup_class(cls):
                cls.word = "abc"

            def setup_method(self):
                self.tape = Tape(self.word)

            def teardown_method(self, method):
                self.tape = None

            def test_forward(self):
                self.tape.move(1)
                assert self.tape.read() == "b"

            def test_write(self):
                self.tape.write("z")
                assert str(self.tape) == "zbc"

            def test_beyond(self):
                self.tape.move(5)
                assert self.tape.read() == "_"
        """,
        """
        class Tape:
            def __init__(self, text):
                self.cells, self.at = dict(enumerate(text)), 0

            def move(self, n):
                self.at += n

            def read(self):
                return self.cells.get(self.at, "_")

            def write(self, c):
                self.cells[self.at] = c

            def __str__(self):
                return "".join(self.cells[k] for k in sorted(self.cells))
        """,
    ),
    case(
        "parameters with identifiers",
        "parametrize",
        "classify",
        """
        import pytest

        @pytest.mark.parametrize(
            "a, b, c, kind",
            [
                pytest.param(3, 3, 3, "equilateral", id="same"),
                pytest.param(3, 4, 3, "isosceles", id="two"),
                (3, 4, 5, "scalene"),
                (1, 2, 9, "invalid"),
            ],
        )
        def test_kind(a, b, c, kind):
            assert classify(a, b, c) == kind
        """,
        """
        def classify(*sides):
            a, b, c = sorted(sides)
            if a + b <= c:
                return "invalid"
            return {1: "equilateral", 2: "isosceles", 3: "scalene"}[len({a, b, c})]
        """,
        """
        def classify(*sides):
            return {1: "equilateral", 2: "isosceles", 3: "scalene"}[len(set(sides))]
        """,
    ),
    case(
        "product of parameters",
        "parametrize",
        "multiply",
        """
        import pytest

        @pytest.mark.parametrize("y", range(3))
        @pytest.mark.parametrize("x", [-1, 0, 7])
        def test_commutes(x, y):
            assert multiply(x, y) == multiply(y, x) == x * y
        """,
        """
        def multiply(x, y):
            result = 0
            for _ in range(abs(y)):
                result += x
            return -result if y < 0 else result
        """,
        """
        def multiply(x, y):
            return x * abs(y)
        """,
    ),
    case(
        "errors are parameters",
        "parametrize",
        "to_int",
        """
        import pytest
        from contextlib import nullcontext as does_not_raise

        @pytest.mark.parametrize(
            ("text", "expectation"),
            [
                ("12", does_not_raise()),
                ("", pytest.raises(ValueError, match="empty")),
                (None, pytest.raises(TypeError)),
            ],
        )
        def test_errors(text, expectation):
            with expectation:
                assert to_int(text) == 12
        """,
        """
        def to_int(text):
            if text is None:
                raise TypeError("a text is needed")
            if not text:
                raise ValueError("empty")
            return int(text)
        """,
        """
        def to_int(text):
            return int(text)
        """,
    ),
    case(
        "class of parametrized tests",
        "parametrize",
        "Temperature",
        """
        import pytest

        CASES = [(0, 32), (100, 212), (-40, -40)]

        @pytest.mark.parametrize("c, f", CASES, ids=str)
        class TestConversion:
            def test_there(self, c, f):
                assert Temperature(c).fahrenheit == f

            def test_back(self, c, f):
                assert Temperature.of_fahrenheit(f).celsius == c

        @pytest.mark.parametrize("low, high", [(a, b) for a, b in zip(range(3), range(1, 4))])
        def test_order(low, high):
            assert Temperature(low) < Temperature(high)
        """,
        """
        class Temperature:
            def __init__(self, celsius):
                self.celsius = celsius

            @property
            def fahrenheit(self):
                return self.celsius * 9 / 5 + 32

            @classmethod
            def of_fahrenheit(cls, f):
                return cls((f - 32) * 5 / 9)

            def __lt__(self, other):
                return self.celsius < other.celsius
        """,
        """
        class Temperature:
            def __init__(self, celsius):
                self.celsius = celsius

            @property
            def fahrenheit(self):
                return self.celsius + 32

            @classmethod
            def of_fahrenheit(cls, f):
                return cls(f - 32)

            def __lt__(self, other):
                return self.celsius < other.celsius
        """,
    ),
    case(
        "functions of the program are parameters",
        "parametrize",
        ("bubble", "insertion"),
        """
        import pytest
        from solution import bubble, insertion

        @pytest.mark.parametrize("sort", [bubble, insertion])
        @pytest.mark.parametrize("data", [[], [1], [2, 1], [3, 1, 2, 3]])
        def test_sorts(sort, data):
            before = data[:]
            assert sort(data) == sorted(before)
            assert data == before
        """,
        """
        def bubble(xs):
            xs = list(xs)
            for end in range(len(xs), 1, -1):
                for i in range(end - 1):
                    if xs[i] > xs[i + 1]:
                        xs[i], xs[i + 1] = xs[i + 1], xs[i]
            return xs

        def insertion(xs):
            out = []
            for x in xs:
                i = len(out)
                while i and out[i - 1] > x:
                    i -= 1
                out.insert(i, x)
            return out
        """,
        """
        def bubble(xs):
            return sorted(xs)

        def insertion(xs):
            return sorted(set(xs))
        """,
    ),
    case(
        "parameters through a fixture",
        "parametrize",
        "Board",
        """
        import pytest

        @pytest.fixture
        def board(request):
            return Board(*request.param)

        @pytest.mark.parametrize("board, cells", [((2, 3), 6), ((1, 1), 1)], indirect=["board"])
        def test_cells(board, cells):
            assert board.cells == cells
            assert len(list(board)) == cells
        """,
        """
        class Board:
            def __init__(self, rows, columns):
                self.rows, self.columns = rows, columns

            @property
            def cells(self):
                return self.rows * self.columns

            def __iter__(self):
                return ((r, c) for r in range(self.rows) for c in range(self.columns))
        """,
        """
        class Board:
            def __init__(self, rows, columns):
                self.rows, self.columns = rows, columns

            @property
            def cells(self):
                return self.rows * self.columns

            def __iter__(self):
                return iter(range(self.rows))
        """,
    ),
    case(
        "approximately equal numbers and lists",
        "approx and raises",
        "normalize",
        """
        import pytest

        def test_list():
            assert normalize([1, 2, 3, 4]) == pytest.approx([0.1, 0.2, 0.3, 0.4])

        def test_sum():
            assert sum(normalize([7, 11, 13])) == pytest.approx(1.0, rel=1e-9)

        def test_dict():
            assert normalize({"a": 1, "b": 3}) == pytest.approx({"a": 0.25, "b": 0.75}, abs=1e-6)
        """,
        """
        def normalize(xs):
            if isinstance(xs, dict):
                total = sum(xs.values())
                return {k: v / total for k, v in xs.items()}
            return [x / sum(xs) for x in xs]
        """,
        """
        def normalize(xs):
            return [x / max(xs) for x in xs]
        """,
    ),
    case(
        "square root by Newton's method",
        "approx and raises",
        "newton_sqrt",
        """
        import math
        import pytest

        @pytest.mark.parametrize("x", [1e-4, 0.5, 2, 1e6])
        def test_close(x):
            assert newton_sqrt(x) == pytest.approx(math.sqrt(x))
            assert math.isclose(newton_sqrt(x) ** 2, x, rel_tol=1e-9)

        def test_negative():
            with pytest.raises(ValueError) as info:
                newton_sqrt(-4)
            assert "-4" in str(info.value)
        """,
        """
        def newton_sqrt(x):
            if x < 0:
                raise ValueError(f"{x} is negative")
            guess = x or 1.0
            for _ in range(100):
                guess = (guess + x / guess) / 2
            return guess
        """,
        """
        def newton_sqrt(x):
            guess = x
            for _ in range(3):
                guess = (guess + x / guess) / 2
            return guess
        """,
    ),
    case(
        "raises with a match and no message",
        "approx and raises",
        "pop_all",
        """
        import pytest

        def test_empty():
            with pytest.raises(IndexError, match=r"^nothing to pop$"):
                pop_all([])

        def test_as_call():
            pytest.raises(TypeError, pop_all, 5)

        def test_pops():
            xs = [1, 2]
            assert pop_all(xs) == [2, 1] and xs == []
        """,
        """
        def pop_all(xs):
            if not len(xs):
                raise IndexError("nothing to pop")
            out = []
            while xs:
                out.append(xs.pop())
            return out
        """,
        """
        def pop_all(xs):
            return xs[::-1]
        """,
    ),
    case(
        "several errors are allowed",
        "approx and raises",
        "lookup",
        """
        import pytest

        def test_missing():
            with pytest.raises((KeyError, IndexError)):
                lookup({"a": [1]}, "b", 0)
            with pytest.raises(LookupError) as info:
                lookup({"a": [1]}, "a", 4)
            assert info.type is IndexError
            assert info.value.args

        def test_found():
            assert lookup({"a": [1]}, "a", 0) == 1
        """,
        """
        def lookup(table, key, index):
            return table[key][index]
        """,
        """
        def lookup(table, key, index):
            return table.get(key, [None])[0]
        """,
    ),
    case(
        "pytest.fail where no error comes",
        "approx and raises",
        "strict_zip",
        """
        import pytest

        def test_lengths():
            try:
                list(strict_zip([1, 2], "a"))
            except ValueError:
                pass
            else:
                pytest.fail("lengths differ")

        def test_pairs():
            assert list(strict_zip([1, 2], "ab")) == [(1, "a"), (2, "b")]
        """,
        """
        def strict_zip(*xs):
            return zip(*xs, strict=True)
        """,
        """
        def strict_zip(*xs):
            return zip(*xs)
        """,
    ),
    case(
        "log file in a temporary folder",
        "temporary folders",
        "rotate_log",
        """
        def test_rotation(tmp_path):
            log = tmp_path / "app.log"
            log.write_text("old")
            rotate_log(log)
            assert not log.exists()
            assert (tmp_path / "app.log.1").read_text() == "old"

        def test_nothing(tmp_path):
            rotate_log(tmp_path / "app.log")
            assert list(tmp_path.iterdir()) == []
        """,
        """
        def rotate_log(path):
            if path.exists():
                path.rename(path.with_name(path.name + ".1"))
        """,
        """
        def rotate_log(path):
            path.write_text("")
        """,
    ),
    case(
        "folder sizes",
        "temporary folders",
        "folder_size",
        """
        import pytest

        @pytest.fixture
        def folder(tmp_path):
            (tmp_path / "sub").mkdir()
            (tmp_path / "a.bin").write_bytes(b"12345")
            (tmp_path / "sub" / "b.bin").write_bytes(b"123")
            return tmp_path

        def test_size(folder):
            assert folder_size(folder) == 8
            assert folder_size(str(folder / "sub")) == 3

        def test_empty(tmp_path):
            assert folder_size(tmp_path) == 0
        """,
        """
        import os

        def folder_size(path):
            return sum(
                os.path.getsize(os.path.join(root, name))
                for root, _, names in os.walk(path)
                for name in names
            )
        """,
        """
        import os

        def folder_size(path):
            return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
        """,
    ),
    case(
        "store survives between objects",
        "temporary folders",
        "KeyStore",
        """
        import os
        import shutil
        import tempfile
        import unittest

        class KeyStoreTest(unittest.TestCase):
            def setUp(self):
                self.folder = tempfile.mkdtemp()
                self.path = os.path.join(self.folder, "keys.json")

            def tearDown(self):
                shutil.rmtree(self.folder)

            def test_saved(self):
                KeyStore(self.path).set("a", [1])
                self.assertTrue(os.path.isfile(self.path))
                self.assertEqual(KeyStore(self.path).get("a"), [1])

            def test_missing(self):
                self.assertIsNone(KeyStore(self.path).get("zzz"))
        """,
        """
        import json
        import os

        class KeyStore:
            def __init__(self, path):
                self.path, self.data = path, {}
                if os.path.exists(path):
                    with open(path) as f:
                        self.data = json.load(f)

            def set(self, key, value):
                self.data[key] = value
                with open(self.path, "w") as f:
                    json.dump(self.data, f)

            def get(self, key):
                return self.data.get(key)
        """,
        """
        class KeyStore:
            data = {}

            def __init__(self, path):
                self.path = path

            def set(self, key, value):
                self.data[key] = value

            def get(self, key):
                return self.data.get(key)
        """,
    ),
    case(
        "files found by a pattern",
        "temporary folders",
        "find_duplicates",
        """
        def test_duplicates(tmp_path):
            for name, text in [("a", "x"), ("b", "y"), ("c", "x")]:
                (tmp_path / f"{name}.txt").write_text(text)
            groups = find_duplicates(tmp_path)
            assert [[p.name for p in g] for g in groups] == [["a.txt", "c.txt"]]
            assert groups[0][0] == tmp_path / "a.txt"
        """,
        """
        def find_duplicates(folder):
            by_content = {}
            for path in sorted(folder.glob("*.txt")):
                by_content.setdefault(path.read_bytes(), []).append(path)
            return [g for g in by_content.values() if len(g) > 1]
        """,
        """
        def find_duplicates(folder):
            return [sorted(folder.glob("*.txt"))]
        """,
    ),
    case(
        "archive is packed and unpacked",
        "temporary folders",
        "pack",
        """
        import zipfile

        def test_pack(tmp_path):
            (tmp_path / "one.txt").write_text("1")
            (tmp_path / "two.txt").write_text("22")
            target = tmp_path / "out.zip"
            assert pack(tmp_path, target) == 2
            with zipfile.ZipFile(target) as z:
                assert sorted(z.namelist()) == ["one.txt", "two.txt"]
                assert z.read("two.txt") == b"22"
        """,
        """
        import zipfile

        def pack(folder, target):
            files = sorted(folder.glob("*.txt"))
            with zipfile.ZipFile(target, "w") as z:
                for path in files:
                    z.write(path, path.name)
            return len(files)
        """,
        """
        import zipfile

        def pack(folder, target):
            with zipfile.ZipFile(target, "w"):
                return 2
        """,
    ),
    case(
        "coroutines in an asynchronous test case",
        "asynchronous tests",
        ("fetch", "fetch_all"),
        """
        import unittest
        from unittest.mock import AsyncMock

        class FetchTest(unittest.IsolatedAsyncioTestCase):
            async def asyncSetUp(self):
                self.client = AsyncMock()
                self.client.get.side_effect = lambda url: f"<{url}>"

            async def test_one(self):
                self.assertEqual(await fetch(self.client, "a"), "<a>")
                self.client.get.assert_awaited_once_with("a")

            async def test_all(self):
                self.assertEqual(await fetch_all(self.client, ["a", "b"]), ["<a>", "<b>"])
                self.assertEqual(self.client.get.await_count, 2)
        """,
        """
        import asyncio

        async def fetch(client, url):
            return await client.get(url)

        async def fetch_all(client, urls):
            return await asyncio.gather(*(fetch(client, u) for u in urls))
        """,
        """
        async def fetch(client, url):
            return f"<{url}>"

        async def fetch_all(client, urls):
            return [f"<{u}>" for u in urls]
        """,
    ),
    case(
        "asynchronous queue with a limit",
        "asynchronous tests",
        "Throttle",
        """
        import asyncio
        import unittest

        class ThrottleTest(unittest.IsolatedAsyncioTestCase):
            async def test_limit(self):
                throttle = Throttle(2)
                async with throttle:
                    async with throttle:
                        self.assertEqual(throttle.active, 2)
                        with self.assertRaises(asyncio.TimeoutError):
                            await asyncio.wait_for(throttle.__aenter__(), 0.01)
                self.assertEqual(throttle.active, 0)
        """,
        """
        import asyncio

        class Throttle:
            def __init__(self, n):
                self._gate, self.active = asyncio.Semaphore(n), 0

            async def __aenter__(self):
                await self._gate.acquire()
                self.active += 1
                return self

            async def __aexit__(self, *_):
                self.active -= 1
                self._gate.release()
        """,
        """
        class Throttle:
            def __init__(self, n):
                self.active = 0

            async def __aenter__(self):
                self.active += 1
                return self

            async def __aexit__(self, *_):
                self.active -= 1
        """,
    ),
    case(
        "errors of coroutines",
        "asynchronous tests",
        "divide",
        """
        import asyncio
        import pytest

        def test_value():
            assert asyncio.run(divide(6, 3)) == 2

        def test_error():
            with pytest.raises(ZeroDivisionError):
                asyncio.run(divide(1, 0))

        def test_gathered():
            async def main():
                return await asyncio.gather(divide(1, 0), divide(4, 2), return_exceptions=True)

            error, value = asyncio.run(main())
            assert isinstance(error, ZeroDivisionError) and value == 2
        """,
        """
        async def divide(a, b):
            return a / b
        """,
        """
        async def divide(a, b):
            return a / b if b else None
        """,
    ),
    case(
        "asynchronous iteration of a class",
        "asynchronous tests",
        "Ticker",
        """
        import unittest

        class TickerTest(unittest.IsolatedAsyncioTestCase):
            async def test_ticks(self):
                seen = []
                async for tick in Ticker(3):
                    seen.append(tick)
                self.assertEqual(seen, ["tick 1", "tick 2", "tick 3"])

            async def test_comprehension(self):
                self.assertEqual([t async for t in Ticker(0)], [])

            async def test_anext(self):
                t = aiter(Ticker(1))
                self.assertEqual(await anext(t), "tick 1")
                self.assertEqual(await anext(t, "done"), "done")
        """,
        """
        class Ticker:
            def __init__(self, n):
                self.n, self.i = n, 0

            def __aiter__(self):
                return self

            async def __anext__(self):
                if self.i == self.n:
                    raise StopAsyncIteration
                self.i += 1
                return f"tick {self.i}"
        """,
        """
        class Ticker:
            def __init__(self, n):
                self.n = n

            async def __aiter__(self):
                for i in range(self.n):
                    yield f"tick {i}"
        """,
    ),
    case(
        "tasks are cancelled",
        "asynchronous tests",
        "cancel_all",
        """
        import asyncio
        import unittest

        class CancelTest(unittest.TestCase):
            def test_cancelled(self):
                async def main():
                    cleaned = []

                    async def job(n):
                        try:
                            await asyncio.sleep(60)
                        finally:
                            cleaned.append(n)

                    tasks = [asyncio.create_task(job(n)) for n in range(3)]
                    await asyncio.sleep(0)
                    n = await cancel_all(tasks)
                    return n, cleaned, [t.cancelled() for t in tasks]

                self.assertEqual(asyncio.run(main()), (3, [0, 1, 2], [True] * 3))
        """,
        """
        import asyncio

        async def cancel_all(tasks):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return len(tasks)
        """,
        """
        async def cancel_all(tasks):
            return len(tasks)
        """,
    ),
    case(
        "asynchronous fixture-like helper",
        "asynchronous tests",
        "Cache",
        """
        import asyncio

        def test_computed_once():
            calls = []

            async def compute(key):
                calls.append(key)
                await asyncio.sleep(0.001)
                return key * 2

            async def main():
                cache = Cache(compute)
                first = await asyncio.gather(cache.get("a"), cache.get("a"))
                return first, await cache.get("b")

            assert asyncio.run(main()) == (["aa", "aa"], "bb")
            assert calls == ["a", "b"]
        """,
        """
        import asyncio

        class Cache:
            def __init__(self, compute):
                self._compute, self._tasks = compute, {}

            async def get(self, key):
                if key not in self._tasks:
                    self._tasks[key] = asyncio.ensure_future(self._compute(key))
                return await self._tasks[key]
        """,
        """
        class Cache:
            def __init__(self, compute):
                self._compute, self._values = compute, {}

            async def get(self, key):
                if key not in self._values:
                    self._values[key] = await self._compute(key)
                return self._values[key]
        """,
    ),
    case(
        "decorator of the program on test functions",
        "decorated tests",
        "with_retries",
        """
        attempts = []

        @with_retries(3)
        def test_flaky():
            attempts.append(1)
            assert len(attempts) >= 2

        def test_attempts():
            assert len(attempts) == 2

        def test_gives_up():
            @with_retries(2)
            def never():
                raise OSError("x")

            try:
                never()
            except OSError:
                pass
            else:
                raise AssertionError
        """,
        """
        import functools

        def with_retries(n):
            def decorate(function):
                @functools.wraps(function)
                def wrapper(*args, **kwargs):
                    for i in range(n):
                        try:
                            return function(*args, **kwargs)
                        except Exception:
                            if i == n - 1:
                                raise

                return wrapper

            return decorate
        """,
        """
        def with_retries(n):
            return lambda function: function
        """,
    ),
    case(
        "context manager of the program as a decorator",
        "decorated tests",
        "Silence",
        """
        import unittest
        from solution import Silence

        class SilenceTest(unittest.TestCase):
            @Silence()
            def test_print(self):
                print("hidden")
                self.assertEqual(Silence.depth, 1)

            def test_text(self):
                with Silence() as s:
                    print("kept")
                self.assertEqual(s.text, "kept\\n")
                self.assertEqual(Silence.depth, 0)
        """,
        """
        import contextlib
        import io

        class Silence(contextlib.ContextDecorator):
            depth = 0

            def __enter__(self):
                Silence.depth += 1
                self._out = io.StringIO()
                self._redirect = contextlib.redirect_stdout(self._out)
                self._redirect.__enter__()
                return self

            def __exit__(self, *error):
                Silence.depth -= 1
                self._redirect.__exit__(*error)
                self.text = self._out.getvalue()
        """,
        """
        class Silence:
            depth = 0
            text = ""

            def __call__(self, function):
                return function

            def __enter__(self):
                return self

            def __exit__(self, *error):
                pass
        """,
    ),
    case(
        "registered checks run in order",
        "decorated tests",
        ("suite", "run_suite"),
        """
        from solution import run_suite, suite

        @suite.register("first")
        def one():
            return 1

        @suite.register("second")
        def two():
            raise ValueError("two is broken")

        def test_report():
            assert run_suite() == {"first": 1, "second": "ValueError: two is broken"}

        def test_functions_stay():
            assert one() == 1
        """,
        """
        class Suite:
            def __init__(self):
                self.checks = {}

            def register(self, name):
                def decorate(function):
                    self.checks[name] = function
                    return function

                return decorate

        suite = Suite()

        def run_suite():
            report = {}
            for name, check in suite.checks.items():
                try:
                    report[name] = check()
                except Exception as error:
                    report[name] = f"{type(error).__name__}: {error}"
            return report
        """,
    ),
    case(
        "stacked patches reach in reverse order",
        "decorated tests",
        "stamp",
        """
        import unittest
        from unittest.mock import patch

        class StampTest(unittest.TestCase):
            @patch("os.getpid", return_value=42)
            @patch("time.time", return_value=1000.9)
            def test_stamp(self, time, getpid):
                self.assertEqual(stamp("job"), "job-42-1000")
                time.assert_called_once_with()
                getpid.assert_called_once_with()
        """,
        """
        import os
        import time

        def stamp(name):
            return f"{name}-{os.getpid()}-{int(time.time())}"
        """,
        """
        def stamp(name):
            return f"{name}-42-1000"
        """,
    ),
    case(
        "class decorator patches each test",
        "decorated tests",
        "roll_two",
        """
        import unittest
        from unittest.mock import patch

        @patch("random.randint")
        class RollTest(unittest.TestCase):
            def test_sum(self, randint):
                randint.side_effect = [2, 5]
                self.assertEqual(roll_two(), 7)

            def test_double(self, randint):
                randint.side_effect = [3, 3]
                self.assertEqual(roll_two(), 12)

            def test_range(self, randint):
                randint.return_value = 1
                roll_two()
                randint.assert_called_with(1, 6)
        """,
        """
        import random

        def roll_two():
            a, b = random.randint(1, 6), random.randint(1, 6)
            return 2 * (a + b) if a == b else a + b
        """,
        """
        import random

        def roll_two():
            return random.randint(1, 6) + random.randint(1, 6)
        """,
    ),
    case(
        "conditional skips beside real tests",
        "skips and expected failures",
        "join_path",
        """
        import sys
        import pytest

        @pytest.mark.skipif(sys.platform == "win32", reason="POSIX paths")
        def test_join():
            assert join_path("a", "b") == "a/b"

        @pytest.mark.skip
        def test_windows():
            assert join_path("a", "b") == "a\\\\b"

        def test_absolute():
            assert join_path("a", "/b") == "/b"
        """,
        """
        import posixpath

        def join_path(*parts):
            return posixpath.join(*parts)
        """,
        """
        def join_path(*parts):
            return "/".join(parts)
        """,
    ),
    case(
        "known fault is marked",
        "skips and expected failures",
        "tokenize",
        """
        import pytest

        def test_words():
            assert tokenize("a b") == ["a", "b"]

        @pytest.mark.xfail(reason="quotes are not supported")
        def test_quotes():
            assert tokenize("'a b' c") == ["a b", "c"]

        @pytest.mark.xfail(raises=AttributeError, strict=True)
        def test_none():
            tokenize(None)
        """,
        """
        def tokenize(text):
            return text.split()
        """,
        """
        def tokenize(text):
            return list(text or "")
        """,
    ),
    case(
        "whole class is skipped, another is not",
        "skips and expected failures",
        "encode",
        """
        import unittest

        @unittest.skip("other alphabet")
        class GreekTest(unittest.TestCase):
            def test_alpha(self):
                self.assertEqual(encode("\\u03b1"), "?")

        @unittest.skipUnless(hasattr(str, "isascii"), "needs isascii")
        class LatinTest(unittest.TestCase):
            def test_runs(self):
                self.assertEqual(encode("aaabcc"), "a3b1c2")

            def test_empty(self):
                self.assertEqual(encode(""), "")
        """,
        """
        from itertools import groupby

        def encode(text):
            return "".join(f"{c}{len(list(g))}" for c, g in groupby(text))
        """,
        """
        def encode(text):
            return "".join(f"{c}{text.count(c)}" for c in text)
        """,
    ),
    case(
        "expected failure of one method",
        "skips and expected failures",
        "Rational",
        """
        import unittest

        class RationalTest(unittest.TestCase):
            def test_sum(self):
                total = Rational(1, 2) + Rational(1, 3)
                self.assertEqual((total.top, total.bottom), (5, 6))

            @unittest.expectedFailure
            def test_sum_with_an_integer(self):
                Rational(1, 2) + 1

            def test_reduced(self):
                self.assertEqual(Rational(2, 4).bottom, 2)
        """,
        """
        from math import gcd

        class Rational:
            def __init__(self, top, bottom):
                d = gcd(top, bottom)
                self.top, self.bottom = top // d, bottom // d

            def __add__(self, other):
                return Rational(
                    self.top * other.bottom + other.top * self.bottom, self.bottom * other.bottom
                )
        """,
        """
        class Rational:
            def __init__(self, top, bottom):
                self.top, self.bottom = top, bottom

            def __add__(self, other):
                return Rational(self.top + other.top, self.bottom + other.bottom)
        """,
    ),
    case(
        "skip in a loop of optional modules",
        "skips and expected failures",
        "dump",
        """
        import pytest

        @pytest.mark.parametrize("module", ["json", "no_such_module_at_all"])
        def test_round_trip(module):
            loader = pytest.importorskip(module)
            assert loader.loads(dump({"b": 1, "a": [2]})) == {"a": [2], "b": 1}

        def test_order():
            if dump({}) != "{}":
                pytest.fail("empty object")
            assert dump({"b": 1, "a": 2}) == '{"a": 2, "b": 1}'
        """,
        """
        import json

        def dump(value):
            return json.dumps(value, sort_keys=True)
        """,
        """
        import json

        def dump(value):
            return json.dumps(value)
        """,
    ),
)
