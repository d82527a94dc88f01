"""The compiled loops behind fractals.py: draw an iterated function system, and render its attractor.

A system is an array (MAPS, NUMBERS), float64. Row i holds a, b, c, d, e, f and p of the map

    (x, y) -> (a x + b y + e, c x + d y + f),

which the chaos game applies with probability p; rows with p = 0 are unused. Random numbers are
SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
All arithmetic is sums, products, quotients and square roots, which IEEE 754 defines to the last
bit. So a seed gives the same pixels on every machine.

Functions are compiled when this module is imported, or loaded from numba's cache, and processes
forked later share them. They share one file, as the cache compares only this file's time stamp.
"""

import math
from collections.abc import Callable

import numpy as np
from numba import njit, types
from numba.core.typing.templates import Signature

MAPS = 8  # maximum number of maps of a system; the minimum is 2
NUMBERS = 7  # of a map, a to f and p
VARIATION = 0.2  # an instance scales one coefficient of all maps by 1 - VARIATION ... 1 + VARIATION
_ORBITS = 4  # advanced together by one random number, since each orbit waits for its last point
_CHOICES = 4096  # probabilities are rounded to multiples of its inverse
_LEAST_AREA = 0.01  # minimum of |det|, or else a flat map would never be applied
_SETTLING = 32  # steps that bring an orbit to the attractor
_BOX_STEPS = 1024  # steps that find the attractor's bounding box
_GRID = 64  # cells per axis that the filling rate is counted over
_MARGIN = 0.04  # of the image, on each side of the attractor
_LEVELS = np.uint64(0x00FF_00FF_00FF)  # mask of the colour lanes; a sum of 256 still fits a lane
_ONE, _FULL = np.uint64(1 << 48), np.uint64(256 << 48)  # counts of points, in the fourth lane
_SYSTEM = types.Array(types.float64, 2, "C", readonly=True)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _compiled(signature: str | Signature) -> Callable[[Callable], Callable]:
    """Compile at once, with a cache if numba finds a writable folder."""

    def compile_it(function: Callable) -> Callable:
        try:
            return njit(signature, cache=True, error_model="numpy")(function)
        except RuntimeError:  # neither this folder nor the user's cache is writable
            return njit(signature, error_model="numpy")(function)

    return compile_it


@_compiled("uint64(uint64[::1])")
def _next(state):
    """Return 64 random bits."""
    state[0] += _GOLDEN
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@_compiled("float64(uint64[::1], float64, float64)")
def _uniform(state, low, high):
    """Return a random number between two."""
    return low + (high - low) * (np.float64(_next(state) >> np.uint64(11)) * 2.0**-53)


@_compiled("boolean(float64, float64, float64, float64)")
def _contracts(a, b, c, d):
    """Whether the larger singular value of [[a, b], [c, d]] is below 1."""
    squares, det = a * a + b * b + c * c + d * d, a * d - b * c
    return squares + math.sqrt(max(squares * squares - 4.0 * det * det, 0.0)) < 2.0


@_compiled("boolean(float64[::1])")
def _contracts_always(m):
    """Whether a map contracts at both ends of each variation; by convexity, also in between."""
    for i in range(4):
        kept = m[i]
        for factor in (1.0 - VARIATION, 1.0 + VARIATION):
            m[i] = kept * factor
            contracts = _contracts(m[0], m[1], m[2], m[3])
            m[i] = kept
            if not contracts:
                return False
    return True


@_compiled("void(uint64[::1], float64[:, ::1])")
def _draw_system(state, system):
    """Fill in 2 ... MAPS contractions of coefficients uniform in [-1, 1], with p ~ |det|."""
    count = 2 + np.int64(_next(state) % np.uint64(MAPS - 1))
    system[:] = 0.0
    total = 0.0
    for i in range(count):
        m = system[i]
        while True:
            for j in range(6):
                m[j] = _uniform(state, -1.0, 1.0)
            if _contracts_always(m):
                break
        m[6] = max(abs(m[0] * m[3] - m[1] * m[2]), _LEAST_AREA)
        total += m[6]
    for i in range(count):
        system[i, 6] /= total


@_compiled("uint8[::1](float64[:, ::1])")
def _choices(system):
    """Return the map that each of _CHOICES equally likely numbers selects."""
    table = np.empty(_CHOICES, np.uint8)
    i, reached = 0, system[0, 6]
    for k in range(_CHOICES):
        while (k + 0.5) / _CHOICES > reached and i < MAPS - 1 and system[i + 1, 6] > 0.0:
            i += 1
            reached += system[i, 6]
        table[k] = i
    return table


@_compiled("void(float64[:, ::1], uint8[::1], uint64, float64[:, ::1])")
def _play(system, table, bits, points):
    """Move each orbit's point (x, y) by a map that 16 of the bits choose."""
    for k in range(_ORBITS):
        i = table[bits % np.uint64(_CHOICES)]
        bits >>= np.uint64(16)
        x, y = points[k, 0], points[k, 1]
        points[k, 0] = system[i, 0] * x + system[i, 1] * y + system[i, 4]
        points[k, 1] = system[i, 2] * x + system[i, 3] * y + system[i, 5]


@_compiled("void(uint64[::1], float64[:, ::1], uint8[::1], float64[:, ::1], float64, float64)")
def _frame(state, system, table, points, start, extent):
    """Move all points to the attractor, and scale its bounding box to start ... start + extent."""
    points[:] = 0.0
    for _ in range(_SETTLING):
        _play(system, table, _next(state), points)
    lowest, highest = np.full(2, np.inf), np.full(2, -np.inf)
    for _ in range(_BOX_STEPS):
        _play(system, table, _next(state), points)
        for k in range(_ORBITS):
            for axis in range(2):
                lowest[axis] = min(lowest[axis], points[k, axis])
                highest[axis] = max(highest[axis], points[k, axis])
    x_scale = extent / max(highest[0] - lowest[0], 1e-9)
    y_scale = extent / max(highest[1] - lowest[1], 1e-9)
    x_shift, y_shift = start - lowest[0] * x_scale, start - lowest[1] * y_scale
    for k in range(_ORBITS):
        points[k, 0] = points[k, 0] * x_scale + x_shift
        points[k, 1] = points[k, 1] * y_scale + y_shift
    for i in range(MAPS):
        m = system[i]
        m[1] *= x_scale / y_scale
        m[2] *= y_scale / x_scale
        m[4] = m[4] * x_scale + x_shift - m[0] * x_shift - m[1] * y_shift
        m[5] = m[5] * y_scale + y_shift - m[2] * x_shift - m[3] * y_shift


@_compiled("float64(uint64[::1], float64[:, ::1])")
def filling_rate(state, system):
    """Return the share of the bounding box's _GRID x _GRID cells hit by 4 points per cell."""
    framed, table, points = system.copy(), _choices(system), np.empty((_ORBITS, 2))
    _frame(state, framed, table, points, 0.0, float(_GRID))
    met = np.zeros((_GRID, _GRID), np.uint8)
    for _ in range(4 * _GRID * _GRID // _ORBITS):
        _play(framed, table, _next(state), points)
        for k in range(_ORBITS):
            x, y = np.uint64(np.int64(points[k, 0])), np.uint64(np.int64(points[k, 1]))
            if x < _GRID and y < _GRID:
                met[y, x] = 1
    return met.sum() / (_GRID * _GRID)


@_compiled("int64(uint64, float64, float64[:, ::1])")
def search(seed, threshold, system):
    """Fill in the first system whose filling rate reaches a threshold; return how many were drawn."""
    state = np.array([seed], np.uint64)
    tries = 0
    while True:
        tries += 1
        _draw_system(state, system)
        if filling_rate(state, system) >= threshold:
            return tries


@_compiled("void(uint64[::1], float64[:, ::1])")
def _vary(state, system):
    """Scale one coefficient of all maps by 1 - VARIATION ... 1 + VARIATION, and mirror the axes."""
    j = np.int64(_next(state) % np.uint64(6))
    system[:, j] *= _uniform(state, 1.0 - VARIATION, 1.0 + VARIATION)
    flips = _next(state)
    if flips & np.uint64(1):  # x -> -x flips the signs of b, c and e
        system[:, 1] *= -1.0
        system[:, 2] *= -1.0
        system[:, 4] *= -1.0
    if flips & np.uint64(2):  # y -> -y flips the signs of b, c and f
        system[:, 1] *= -1.0
        system[:, 2] *= -1.0
        system[:, 5] *= -1.0


@_compiled("uint64(float64, float64, float64)")
def _to_rgb(hue, saturation, value):
    """Return a hue in [0, 1) as red, green and blue, 0 ... 255, in lanes of 16 bits."""
    colour = np.uint64(0)
    for channel in range(3):
        phase = (hue + (3 - channel) % 3 / 3.0) % 1.0 * 6.0
        share = min(max(abs(phase - 3.0) - 1.0, 0.0), 1.0)
        level = np.uint64(255.0 * value * (1.0 - saturation * (1.0 - share)))
        colour |= level << np.uint64(16 * channel)
    return colour


@_compiled("uint64[::1](uint64[::1])")
def _colours(state):
    """Draw a bright colour for each map and, last, two dark ones for the background's ends."""
    colours = np.empty(MAPS + 2, np.uint64)
    for i in range(MAPS):
        hue, saturation = _uniform(state, 0.0, 1.0), _uniform(state, 0.3, 1.0)
        colours[i] = _to_rgb(hue, saturation, _uniform(state, 0.7, 1.0))
    for i in range(MAPS, MAPS + 2):
        hue, saturation = _uniform(state, 0.0, 1.0), _uniform(state, 0.0, 0.8)
        colours[i] = _to_rgb(hue, saturation, _uniform(state, 0.0, 0.3))
    return colours


@_compiled("void(uint64[::1], float64[:, ::1], uint64[::1], int64, uint64[:, ::1])")
def _splat(state, system, colours, num_points, light):
    """Add each point's colour, mixed along its orbit, to its pixel: lanes red, green, blue, count."""
    size = np.uint64(len(light))
    table, points = _choices(system), np.empty((_ORBITS, 2))
    _frame(state, system, table, points, size * _MARGIN, size * (1.0 - 2.0 * _MARGIN))
    mixed = np.zeros(_ORBITS, np.uint64)
    for _ in range(num_points // _ORBITS):
        bits = _next(state)
        _play(system, table, bits, points)
        for k in range(_ORBITS):
            colour = colours[table[bits % np.uint64(_CHOICES)]]
            bits >>= np.uint64(16)
            mixed[k] = ((mixed[k] + colour) >> np.uint64(1)) & _LEVELS
            # As unsigned numbers, points left of or above the image are too large. A pixel with a
            # full count stays as it is, which hardly shows: it has its colour by then.
            x, y = np.uint64(np.int64(points[k, 0])), np.uint64(np.int64(points[k, 1]))
            if x < size and y < size and light[y, x] < _FULL:
                light[y, x] += mixed[k] + _ONE


@_compiled("void(uint64[:, ::1], uint64[::1], uint8[:, :, ::1])")
def _develop(light, colours, image):
    """Blend each pixel's mean colour of n points, weighted n / (n + 1), into the background."""
    size = len(light)
    first, last = colours[MAPS], colours[MAPS + 1]
    for y in range(size):
        for channel in range(3):
            lane = np.uint64(16 * channel)
            start = np.float32((first >> lane) & np.uint64(0xFF))
            end = np.float32((last >> lane) & np.uint64(0xFF))
            behind = start + (end - start) * np.float32(y) / np.float32(size)
            for x in range(size):
                level = np.float32((light[y, x] >> lane) & np.uint64(0xFFFF))
                count = np.float32(light[y, x] >> np.uint64(48))
                image[y, x, channel] = np.uint8((level + behind) / (count + np.float32(1.0)))


@_compiled(types.void(types.uint64, _SYSTEM, types.int64, types.uint8[:, :, ::1]))
def render(seed, system, points_per_pixel, image):
    """Draw one instance of a system into an image (size, size, 3)."""
    state = np.array([seed], np.uint64)
    varied = system.copy()
    _vary(state, varied)
    colours = _colours(state)
    size = len(image)
    light = np.zeros((size, size), np.uint64)
    _splat(state, varied, colours, points_per_pixel * size * size, light)
    _develop(light, colours, image)
