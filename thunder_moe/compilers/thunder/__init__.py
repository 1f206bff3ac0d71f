"""The Lightning Thunder side: executor.py is what users import or name as a plugin, rewrite.py changes the trace.
Called by Thunder; calls thunder_compat.py, which imports Thunder before the modules of this folder do. Nothing outside
of it but integrations/huggingface/thunder_*.py imports Thunder when it is loaded.
"""

from thunder_moe.compilers.thunder_compat import import_thunder

import_thunder()
