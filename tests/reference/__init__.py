"""A float64 reference of the decoder in numpy, written from the published formulas and the format's description.

Nothing in here imports sparseflow: the packed folder is parsed from its bytes, the geometry from config.json, and every
operation is spelled out in `ops`. What the engine and this reference agree on, two independent readings agree on.

* `ops`         one function per operation, shapes in the docstrings; also the yardstick of the kernel tests
* `checkpoint`  a safetensors folder -> the tensors of the unquantised model
* `packed`      a packed folder -> the tensors of the quantised model, from the documented bytes
* `decoder`     the forward pass over either
* `rounding`    the activation rule inside a pass, and which activations came near to a tie
* `agreement`   whether an engine's logits are the reference's when near-ties may go either way

Every function computes in the dtype of its inputs. float64 is the reference; float32 inputs give a second float32
engine, which measures how far single precision itself moves a result.
"""
