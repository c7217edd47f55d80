"""The memory that a run needs on every GPU and host, phase by phase, computed before it starts.

``budget.memory_budget`` is the entry point; nothing here touches a device or a process group.
"""
