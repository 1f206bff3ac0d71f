"""The Lightning Thunder executor: `executor` is what users import, `rewrite` changes the trace. Nothing else
imports thunder."""
