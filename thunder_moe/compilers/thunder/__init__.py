"""The Lightning Thunder side: executor.py is what users import, plugin.py the same for thunder.compile, rewrite.py
changes the trace. Called by Thunder; nothing outside of this folder but integrations/huggingface/thunder_*.py imports
thunder when it is loaded.
"""
