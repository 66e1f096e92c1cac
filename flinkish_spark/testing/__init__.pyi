from .broker import LocalBroker as LocalBroker
from .crash_points import KillAt as KillAt
from .program_harness import Output as Output
from .program_harness import ProgramHarness as ProgramHarness
from .program_harness import ProgramSnapshot as ProgramSnapshot
from .sink_contract import SINK_CASES as SINK_CASES
from .sink_contract import SinkUnderTest as SinkUnderTest
from .sink_contract import check_sink as check_sink
