"""New keys and values into their pages."""

import triton
import triton.language as tl


@triton.jit
def append(
    Key, Value,  # [tokens, heads, dim]
    Slots,  # int64 [tokens]; below 0: the token is padding
    Keys, Values,  # [slots, heads, dim]
    key_token, key_head, value_token, value_head,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(Slots + token)
    if slot >= 0:
        channel = tl.arange(0, KEY_PADDED)
        real = channel < KEY_DIM
        key = tl.load(Key + token.to(tl.int64) * key_token + head * key_head + channel, mask=real)
        tl.store(Keys + (slot * HEADS + head) * KEY_DIM + channel, key, mask=real)
        channel = tl.arange(0, VALUE_PADDED)
        real = channel < VALUE_DIM
        value = tl.load(Value + token.to(tl.int64) * value_token + head * value_head + channel, mask=real)
        tl.store(Values + (slot * HEADS + head) * VALUE_DIM + channel, value, mask=real)
