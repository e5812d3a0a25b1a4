"""Native readers of JSON lists of numbers: from the text into a tensor's memory, checked and correctly rounded.

`read_floats`, `read_integers` and `read_booleans` take `(text, end, elements, state)`: the address of a text, its
length, the address of a tensor's elements, and that of the words of `ReadWord`. A zero byte must follow the text.
Booleans are elements of one byte. The readers accept lists in JSON's grammar, flat or nested as the tensor's shape,
with NaN and Infinity as Python writes them. For any other text, and for numbers that float64 or the integer type cannot
hold, the status is REFUSED, and the elements may have been overwritten.

Digits are read eight at a time: a word of text, its first byte lowest. If `w` and `10**q` are small, one correctly
rounded operation turns a decimal number `w * 10**q` into a float64 (Clinger 1990). Otherwise Lemire's algorithm does
("Number Parsing at a Gigabyte per Second", 2021), which needs no fallback for `w` below 2**64 (Mushtak and Lemire,
"Fast Number Parsing Without Fallback", 2023). Of 20 or more significant digits the first 19 are used: if `w` and
`w + 1` become the same float64, so does the number; otherwise the caller must parse it (HARD). `_short_decimals` is a
fast path for lists of short decimals, such as pixels and features. Elements of float32 are rounded from the float64,
so a number may be rounded twice, and one beyond float32 becomes infinite.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from struct import pack, unpack

from lathe.core.codegen.llvm_ir import DOUBLE, number
from lathe.core.codegen.procedure import Condition, Local, Procedure, Word

MAX_RANK = 32
_DIGITS = 19  # numbers of 19 digits always fit 64 bits
_EXACT = 22  # 10**22 is the largest power of ten that is a float64
_LOWEST, _HIGHEST = -342, 308  # exponents beyond which every number is 0 or infinite
_BLOCK = 64  # bytes of text that `_short_decimals` examines at once
_REST = 8  # numbers that are read one by one after `_short_decimals` has read none
_EIGHT_ZEROS, _EIGHT_HIGH = 0x3030303030303030, 0x8080808080808080
_NAN = 0x7FF8000000000000
_INFINITY = 0x7FF0000000000000


class ReadWord(IntEnum):
    """The indices of the 64-bit words in a reader's state, which hold its parameters and its results."""

    AT = 0  # offset in the text: the list's first bracket; after the call the list's end, or a HARD number's start
    INDEX = 1  # the number of elements stored so far
    STATUS = 2  # a ReadStatus
    STOP = 3  # where a HARD number ends
    COUNT = 4  # the number of elements expected, at least 1
    WIDTH = 5  # bytes of an element
    LEAST = 6  # for integers: the magnitude of the least value
    MOST = 7  # for integers: the greatest value
    DEPTH = 8  # the nesting depth of the list, which the reader finds
    RANK = 9
    SHAPE = 10  # sizes of the dimensions
    SIZE = SHAPE + MAX_RANK


class ReadStatus(IntEnum):
    """How a call of a reader ended."""

    DONE = 0
    REFUSED = 1  # the text is not a list of the expected numbers
    HARD = 2  # the caller must parse one number, store it, set AT to STOP, add 1 to INDEX, and call again


READERS = ("read_floats", "read_integers", "read_booleans")


def source(name: str) -> str:
    """The LLVM assembly of the reader `name`: `read_floats`, `read_integers` or `read_booleans`."""
    element: Callable[[_List], None] = {"floats": _float, "integers": _integer, "booleans": _boolean}[name[5:]]
    reader = _List(Procedure(name, 4))
    reader.write(element, _short_decimals if element is _float else None)
    return reader.p.finish()


class _List:
    """The code that all readers share: brackets, commas and spaces."""

    def __init__(self, p: Procedure) -> None:
        self.p = p
        self.text, end, self.elements, self.state = p.arguments
        self.last = self.text + end - 8  # the last address from which eight bytes of text can be read
        self.at = p.local(self.text + self.get(ReadWord.AT))
        self.index = p.local(self.get(ReadWord.INDEX))
        self.width = self.get(ReadWord.WIDTH)
        self.rest = self.p.local(0)  # elements to read one by one before `run` is tried again

    def get(self, word: int) -> Word:
        return self.p.load(self.state + 8 * word)

    def set(self, word: int, value: Word | int) -> None:
        self.p.store(self.state + 8 * word, value, align=8)

    def size(self, dimension: Word) -> Word:
        """The size of dimension number `dimension` of the tensor's shape, from the reader's state."""
        return self.p.load(self.state + 8 * ReadWord.SHAPE + (dimension << 3))

    def finish(self, status: ReadStatus) -> None:
        self.set(ReadWord.AT, self.at.value - self.text)
        self.set(ReadWord.INDEX, self.index.value)
        self.set(ReadWord.STATUS, status)
        self.p.stop()

    def refuse(self, condition: Condition) -> None:
        with self.p.when(condition, rare=True):
            self.finish(ReadStatus.REFUSED)

    def char(self) -> Word:
        """The byte at the current position; 0 at the end of the text."""
        return self.p.byte(self.at.value)

    def skip_spaces(self) -> None:
        p = self.p
        with p.when(self.char() < 0x21, rare=True), p.loop() as loop:
            c = self.char()
            with p.when(~(c.equals(0x20) | c.equals(0x0A) | c.equals(0x0D) | c.equals(0x09))):
                p.leave(loop)
            self.at.value += 1

    def skip(self, character: str) -> None:
        """Read spaces and then `character`; the reader refuses the text if it is missing."""
        self.skip_spaces()
        self.refuse(self.char().differs(ord(character)))
        self.at.value += 1

    def write(self, element: Callable[[_List], None], run: Callable[[_List, Local], None] | None = None) -> None:
        """Generate the code of a reader; `element` generates the code that reads one element.

        `run` generates a fast path, which reads elements with their commas, but never the last element of a row. Its
        second argument is the number of elements left in the row.
        """
        p = self.p
        count = self.get(ReadWord.COUNT)
        resumed = p.local((self.index.value > 0).word)
        with p.when(self.index.value.equals(0)):
            self._open(count)
        depth = p.local(self.get(ReadWord.DEPTH))
        row = p.local(count)
        with p.when(depth.value > 1):
            row.value = self.size(depth.value - 1)
        done = self.index.value % row.value
        left = p.local(p.choose(done.equals(0) & resumed.value.differs(0), 0, row.value - done))
        with p.loop() as loop:
            with p.when(resumed.value.equals(0)):
                if run is not None:
                    with p.if_else(self.rest.value.equals(0)) as (now, later):
                        with now:
                            run(self, left)
                            self.skip_spaces()
                        with later:
                            self.rest.value -= 1
                element(self)
                self.index.value += 1
                left.value -= 1
            resumed.value = 0
            with p.if_else(left.value.differs(0)) as (inside, at_end):
                with inside:
                    self.skip(",")
                    self.at.value += self.char().equals(0x20).word
                    self.skip_spaces()
                with at_end:
                    ended = self._ended(depth)
                    self._each(ended, "]")
                    with p.when(self.index.value.equals(count)):
                        p.leave(loop)
                    self.skip(",")
                    self._each(ended, "[")
                    self.skip_spaces()
                    left.value = row.value
        self.finish(ReadStatus.DONE)

    def _open(self, count: Word) -> None:
        """Read the opening brackets, whose number is the nesting depth of the list.

        The reader refuses a depth of 0, one above the rank (above 1 for rank 0), and one above 1 unless the product of
        the sizes of as many dimensions is `count`.
        """
        p = self.p
        depth, elements = p.local(0), p.local(1)
        rank = self.get(ReadWord.RANK)
        with p.loop() as loop:
            self.skip_spaces()
            with p.when(self.char().differs(ord("["))):
                p.leave(loop)
            self.refuse((depth.value >= rank) & (depth.value > 0))
            with p.when(depth.value < rank):
                elements.value *= self.size(depth.value)
            self.at.value += 1
            depth.value += 1
        self.refuse(depth.value.equals(0) | ((depth.value > 1) & elements.value.differs(count)))
        self.set(ReadWord.DEPTH, depth.value)

    def _ended(self, depth: Local) -> Local:
        """The number of brackets that close after the current element, the last one of a row."""
        p = self.p
        ended, dimension = p.local(1), p.local(depth.value - 2)
        with p.when(depth.value > 1):
            rows = p.local(self.index.value // self.size(depth.value - 1))
            with p.loop() as loop:
                with p.when(dimension.value < 0):
                    p.leave(loop)
                size = self.size(dimension.value)
                with p.when((rows.value % size).differs(0)):
                    p.leave(loop)
                rows.value = rows.value // size
                ended.value += 1
                dimension.value -= 1
        return ended

    def _each(self, count: Local, bracket: str) -> None:
        left = self.p.local(count.value)
        with self.p.loop() as loop:
            self.skip(bracket)
            left.value -= 1
            with self.p.when(left.value.equals(0)):
                self.p.leave(loop)

    # Digits

    def eight(self) -> Word:
        """The next eight bytes as a word, with zeros beyond the end of the text."""
        p = self.p
        word = p.local()
        with p.if_else(self.at.value <= self.last) as (whole, part):
            with whole:
                word.value = p.load(self.at.value, 1)
            with part:
                word.value = 0
                taken = p.local()
                with p.loop() as loop:
                    at = self.at.value + taken.value
                    with p.when((at >= self.last + 8) | taken.value.equals(8)):
                        p.leave(loop)
                    word.value |= p.byte(at) << (taken.value << 3)
                    taken.value += 1
        return word.value

    def digits(self) -> tuple[Word, Word]:
        """The number of digits that the next eight bytes begin with, and their value, undefined if there are none."""
        p = self.p
        values = self.eight() ^ _EIGHT_ZEROS
        others = ((values + 0x7676767676767676) | values) & _EIGHT_HIGH
        count = p.trailing_zeros(others) >> 3
        return count, self.number_of(values << ((p.word(64) - (count << 3)) & 63))  # zeros before the digits

    @staticmethod
    def number_of(digits: Word) -> Word:
        """The value of eight decimal digits, the first one in the lowest byte."""
        pairs = (digits * 10 + (digits >> 8)) & 0x00FF00FF00FF00FF
        fours = (pairs * 100 + (pairs >> 16)) & 0x0000FFFF0000FFFF
        return (fours * 10_000 + (fours >> 32)) & 0xFFFFFFFF

    def take_digits(self, sum_: Local, powers: Word) -> Word:
        """Read one or more digits and append them to the decimal number `sum_`; returns the number of digits.

        The reader refuses the text if there is no digit. `powers`: the address of the table of `_powers`.
        """
        p = self.p
        begin = self.at.value
        count, said = self.digits()
        self.refuse(count.equals(0))
        sum_.value = sum_.value * p.load(powers + (count << 3)) + said
        self.at.value += count
        with p.when(count.equals(8)), p.loop() as loop:
            count, said = self.digits()
            with p.when(count.equals(0)):
                p.leave(loop)
            sum_.value = sum_.value * p.load(powers + (count << 3)) + said
            self.at.value += count
        return self.at.value - begin


def _powers(p: Procedure) -> Word:
    """The address of a constant table of the 64-bit integers 10**0 to 10**8."""
    return p.table("powers", [10**i for i in range(9)])


def _sign(r: _List) -> Word:
    """Read an optional minus sign; returns 1 if there is one, otherwise 0."""
    negative = r.char().equals(ord("-")).word
    r.at.value += negative
    return negative


def _boolean(r: _List) -> None:
    p = r.p
    word = r.eight()
    true = (word & 0xFFFFFFFF).equals(int.from_bytes(b"true", "little"))
    r.refuse(~(true | (word & 0xFFFFFFFFFF).equals(int.from_bytes(b"false", "little"))))
    p.store(r.elements + r.index.value, true.word, 8)
    r.at.value += p.choose(true, 4, 5)


def _integer(r: _List) -> None:
    p = r.p
    negative = _sign(r)
    first, sum_ = r.char(), p.local(0)
    count = r.take_digits(sum_, _powers(p))
    r.refuse(first.equals(ord("0")) & count.differs(1))
    with p.when(count > _DIGITS, rare=True):  # 20 digits that wrapped around are less than 10**19 and begin with 1
        r.refuse((count > 20) | first.differs(ord("1")) | sum_.value.below(10**19))
    most = p.choose(negative.differs(0), r.get(ReadWord.LEAST), r.get(ReadWord.MOST))
    r.refuse(most.below(sum_.value))
    value = (sum_.value ^ negative.negated()) + negative
    _store(r, {1: (value, 8), 2: (value, 16), 4: (value, 32), 8: (value, 64)})


def _store(r: _List, by_width: dict[int, tuple[Word, int]]) -> None:
    """Store the next element of the tensor.

    `by_width` maps each possible width of an element in bytes to the value and the number of its bits to store.
    """
    for width, (value, bits) in by_width.items():
        with r.p.when(r.width.equals(width)):
            r.p.store(r.elements + r.index.value * width, value, bits)


def _float(r: _List) -> None:
    p = r.p
    begin = r.at.value
    bits, negative = p.local(), p.local(_sign(r))
    with p.if_else(r.char() < 0x3A) as (number, word):
        with number:
            bits.value = _decimal(r, begin, negative)
        with word:
            bits.value = _word(r)
    _store_float(r, bits.value | (negative.value << 63))


def _store_float(r: _List, bits: Word) -> None:
    """Store the float64 with these bits as the next element, rounded if elements are float32."""
    p = r.p
    with p.when(r.width.equals(8)):
        p.store(r.elements + (r.index.value << 3), bits)
    with p.when(r.width.equals(4)):
        p.store(r.elements + (r.index.value << 2), p.bits_as_float32(bits), 32)


def _short_decimals(r: _List, left: Local) -> None:
    """Read numbers with one digit before the point and up to eight after it, each followed by a comma.

    A space and a minus may precede a number. The code represents a block of text by bit sets of its bytes (as in
    Langdale and Lemire, "Parsing Gigabytes of JSON per Second", 2019). So it checks the grammar of all numbers at once,
    and knows where each number begins before it has read the preceding ones.
    """
    p = r.p
    r.rest.value = _REST
    with p.loop() as blocks:
        block = r.at.value
        with p.when((left.value <= 1) | (block > r.last - _BLOCK)):
            p.leave(blocks)
        commas, points, minuses = p.local(), p.local(), p.local()
        commas.value, points.value, minuses.value = _short_decimals_in(p, block)
        with p.when(commas.value.equals(0)):
            p.leave(blocks)
        with p.loop() as numbers:
            point, comma = p.trailing_zeros(points.value), p.trailing_zeros(commas.value)
            with p.when((comma - point > 9) | (left.value <= 1)):
                p.leave(blocks)
            r.rest.value = 0
            bits = _hundred_millionths(p, block + point, comma - point - 1)
            _store_float(r, bits | ((minuses.value << 2 >> point) << 63))
            r.at.value = block + comma + 1
            r.index.value += 1
            left.value -= 1
            points.value &= points.value - 1
            commas.value &= commas.value - 1
            with p.when(commas.value.equals(0)):
                p.leave(numbers)


def _short_decimals_in(p: Procedure, block: Word) -> tuple[Word, Word, Word]:
    """Bit sets for a block: the commas before the first byte that breaks the grammar, all points, and all minuses."""
    digits, commas, points = p.bytes_within(block, "0", "9"), p.bytes_within(block, ","), p.bytes_within(block, ".")
    spaces, minuses = p.bytes_within(block, " "), p.bytes_within(block, "-")
    whole = digits & ((commas | spaces | minuses) << 1 | 1)  # digits that begin a number
    # Bytes that break the grammar: a point follows each first digit and no other byte, a comma follows a digit, a space
    # a comma, and a minus a comma or a space. The block may begin with a digit, a space or a minus.
    odd = ~(digits | commas | points | spaces | minuses)
    odd |= points ^ (whole << 1)
    odd |= commas & ~(digits << 1)
    odd |= spaces & ~(commas << 1 | 1)
    odd |= minuses & ~((commas | spaces) << 1 | 1)
    return commas & ((odd & odd.negated()) - 1), points, minuses


def _hundred_millionths(p: Procedure, point: Word, places: Word) -> Word:
    """The float64 bits of a decimal with one digit before the point and `places` (1 to 8) digits after it.

    `point`: the address of the point.
    """
    behind = (p.load(point + 1, 1) ^ _EIGHT_ZEROS) & (p.word(-1) >> ((p.word(64) - (places << 3)) & 63))
    whole = (p.byte(point - 1) & 0xF) * 10**8 + _List.number_of(behind)
    # float64 represents both operands exactly, so the division rounds correctly (Clinger).
    return p.bits_of(p.builder.binary("fdiv", p.double_of(whole), number(DOUBLE, 1e8)))


def _word(r: _List) -> Word:
    """Read NaN, which must not have a sign, or Infinity; returns the bits of the float64."""
    p = r.p
    text = r.eight()
    is_nan = (text & 0xFFFFFF).equals(int.from_bytes(b"NaN", "little"))
    is_nan = is_nan & p.byte(r.at.value - 1).differs(ord("-"))
    r.refuse(~(is_nan | text.equals(int.from_bytes(b"Infinity", "little"))))
    r.at.value += p.choose(is_nan, 3, 8)
    return p.choose(is_nan, _NAN, _INFINITY)


def _decimal(r: _List, begin: Word, negative: Local) -> Word:
    """Read a number after its sign; returns the float64 bits. Clears `negative` for the integer -0, 0 in Python."""
    p = r.p
    powers = _powers(p)
    digits_at, first = r.at.value, r.char()
    w, q, is_integer = p.local(0), p.local(0), p.local(1)
    count = p.local(r.take_digits(w, powers))
    r.refuse(first.equals(ord("0")) & count.value.differs(1))
    with p.when(r.char().equals(ord("."))):
        r.at.value += 1
        further = r.take_digits(w, powers)
        count.value += further
        q.value -= further
        is_integer.value = 0
    with p.when((r.char() | 0x20).equals(ord("e")), rare=True):
        q.value += _exponent(r)
        is_integer.value = 0
    cut = p.local(0)
    with p.when(count.value > _DIGITS, rare=True):
        _cut(r, digits_at, count, w, q, cut)
    negative.value &= (~(is_integer.value.differs(0) & w.value.equals(0))).word
    return _nearest(r, begin, w, q, cut)


def _exponent(r: _List) -> Word:
    """Read an exponent: e, an optional sign, and one to seven digits; returns its value."""
    r.at.value += 1
    down = r.char().equals(ord("-")).word
    r.at.value += (r.char().equals(ord("+"))).word | down
    count, said = r.digits()
    r.refuse(count.equals(0) | count.equals(8))
    r.at.value += count
    return (said ^ down.negated()) + down


def _cut(r: _List, digits_at: Word, count: Local, w: Local, q: Local, cut: Local) -> None:
    """Reduce a number of more than 19 significant digits: `w` gets the first 19, `q` grows by the number of the others.

    `cut` is set to 1 then; otherwise `w`, `q` and `cut` stay unchanged. `digits_at` is the address of the first digit.
    `count` is the number of digits, zeros at the front included, and becomes that of the significant digits.
    """
    p = r.p
    look = p.local(digits_at)
    with p.loop() as loop:
        c = p.byte(look.value)
        with p.when(c.differs(ord("0")) & c.differs(ord("."))):
            p.leave(loop)
        count.value -= c.equals(ord("0")).word
        look.value += 1
    with p.when(count.value > _DIGITS):
        q.value += count.value - _DIGITS
        cut.value, w.value = 1, 0
        taken = p.local(0)
        with p.loop() as loop:
            c = p.byte(look.value)
            with p.when(c.differs(ord("."))):
                w.value = w.value * 10 + (c - ord("0"))
                taken.value += 1
            look.value += 1
            with p.when(taken.value.equals(_DIGITS)):
                p.leave(loop)


def _nearest(r: _List, begin: Word, w: Local, q: Local, cut: Local) -> Word:
    """The bits of the float64 nearest to `w * 10**q`.

    If `cut` is 1, digits beyond `w` were dropped: the reader ends as HARD unless `(w + 1) * 10**q` gives the same bits.
    `begin` is the address of the number's first character.
    """
    p = r.p
    bits = p.local()
    small = (w.value >> 53).equals(0) & (q.value + _EXACT).below(2 * _EXACT + 1)
    with p.if_else(small) as (exact, other):
        with exact:
            bits.value = _clinger(p, w.value, q.value)
        with other, p.loop() as loop:
            before = bits.value
            bits.value = _lemire(r, w.value, q.value)
            with p.when(cut.value.equals(0)):
                p.leave(loop)
            with p.when(cut.value.equals(2)):
                with p.when(bits.value.differs(before)):
                    r.set(ReadWord.STOP, r.at.value - r.text)
                    r.at.value = begin
                    r.finish(ReadStatus.HARD)
                p.leave(loop)
            cut.value = 2
            w.value += 1
    return bits.value


def _clinger(p: Procedure, w: Word, q: Word) -> Word:
    """The bits of the float64 nearest to `w * 10**q`, if float64 represents `w` and `10**abs(q)` exactly.

    One multiplication or division then rounds correctly.
    """
    bits, number = p.local(), p.double_of(w)
    powers = p.table("exact", [_bits(10.0**i) for i in range(_EXACT + 1)])
    with p.if_else(q < 0) as (divided, multiplied):
        with divided:
            bits.value = p.bits_of(p.builder.binary("fdiv", number, p.double_at(powers - (q << 3))))
        with multiplied:
            bits.value = p.bits_of(p.builder.binary("fmul", number, p.double_at(powers + (q << 3))))
    return bits.value


def _lemire(r: _List, w: Word, q: Word) -> Word:
    """The bits of the float64 nearest to `w * 10**q`, for any `w` and `q`. The reader refuses infinite results."""
    p = r.p
    bits = p.local(0)
    with p.when(w.differs(0) & (q >= _LOWEST)):
        r.refuse(q > _HIGHEST)
        zeros = p.leading_zeros(w)
        normal = w << zeros
        entry = p.table("fives", _fives()) + ((q - _LOWEST) << 4)
        low, high_word = p.product(normal, p.load(entry))
        low_part, high = p.local(low), p.local(high_word)
        with p.when((high.value & 0x1FF).equals(0x1FF), rare=True):
            _, more = p.product(normal, p.load(entry + 8))
            low_part.value += more
            high.value += low_part.value.below(more).word
        upper = high.value >> 63
        mantissa = p.local(high.value >> (upper + 9))
        power = p.local((((q * 217_706).shift_right_arithmetic(16) + 63) + upper - zeros) + 1023)
        with p.if_else(power.value <= 0) as (subnormal, usual):
            with subnormal, p.when(power.value > -63):
                mantissa.value = mantissa.value >> (p.word(1) - power.value)
                mantissa.value += mantissa.value & 1
                bits.value = mantissa.value >> 1  # rounding up to 2**52 gives the least normal number
            with usual:
                r.refuse(power.value > 2046)
                half = low_part.value.below(2) & (q >= -4) & (q <= 23) & (mantissa.value & 3).equals(1)
                exact = (mantissa.value << (upper + 9)).equals(high.value)
                mantissa.value = mantissa.value & p.choose(half & exact, -2, -1)
                mantissa.value += mantissa.value & 1
                # Bit 52 of the mantissa adds 1 to the exponent. If rounding carries into bit 53, that adds 2.
                bits.value = (mantissa.value >> 1) + ((power.value - 1) << 52)
                r.refuse(bits.value >= _INFINITY)
    return bits.value


def _fives() -> list[int]:
    """The leading 128 bits of 5**q for each exponent q, upper word first; reciprocals (q < 0) are rounded up."""
    words: list[int] = []
    for q in range(_LOWEST, _HIGHEST + 1):
        power = 5 ** abs(q)
        if q >= 0:
            length = power.bit_length()
            bits = power >> (length - 128) if length > 128 else power << (128 - length)
        else:
            length = (power - 1).bit_length()
            bits = (1 << (length + 127 if q >= -27 else 2 * length + 128)) // power + 1
            bits >>= max(0, bits.bit_length() - 128)
        words += (bits >> 64, bits & ((1 << 64) - 1))
    return words


def _bits(number: float) -> int:
    return int(unpack("<q", pack("<d", number))[0])
