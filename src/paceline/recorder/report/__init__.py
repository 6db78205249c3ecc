"""A recorded run as one HTML page and one trace: who was late, what was hidden, what it cost."""

from .report import Report, read_report, trace_path, write_report

__all__ = ["Report", "read_report", "trace_path", "write_report"]
