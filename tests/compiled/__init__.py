"""Compiled code: objects in graphs, compiled wrappers, whole compiled steps.

After each compilation torch measures how long its guards take, with caches flushed for it: in small
graphs a fourth of all the time. Here, and in ranks that import a file of this folder, it does not.
"""

import torch._dynamo.guards

if hasattr(torch._dynamo.guards, "profile_guard_manager"):
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # microseconds, for a log
