/* Reads memory and does next to nothing with it: how fast weights could be read, if computing with them were free. */
#ifndef SF_BANDWIDTH_COMMON
#define SF_BANDWIDTH_COMMON

enum { SF_READ_UNIT = 1 << 20, SF_READ_STEP = 256 };

struct sf_read {
    const uint8_t *bytes;
    long count;       /* a multiple of SF_READ_STEP */
    uint64_t *folded; /* [units of SF_READ_UNIT bytes] exclusive or of the unit's 64-bit words: what keeps the loads alive */
};
#endif

static void SF_NAME(read_unit)(void *argument, long unit, int worker)
{
    const struct sf_read *call = argument;
    const uint8_t *bytes = call->bytes + unit * SF_READ_UNIT;
    const long left = call->count - unit * SF_READ_UNIT, count = left < SF_READ_UNIT ? left : SF_READ_UNIT;
    uint64_t words[8] = {0}, folded = 0;
    (void)worker;
#if SF_LANES_AVX512
    __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
    for (long i = 0; i < count; i += SF_READ_STEP) {
        a = _mm512_xor_si512(a, _mm512_loadu_si512(bytes + i));
        b = _mm512_xor_si512(b, _mm512_loadu_si512(bytes + i + 64));
        c = _mm512_xor_si512(c, _mm512_loadu_si512(bytes + i + 128));
        d = _mm512_xor_si512(d, _mm512_loadu_si512(bytes + i + 192));
    }
    _mm512_storeu_si512(words, _mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d)));
#elif SF_LANES_AVX2
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    for (long i = 0; i < count; i += 128) {
        a = _mm256_xor_si256(a, _mm256_loadu_si256((const __m256i *)(bytes + i)));
        b = _mm256_xor_si256(b, _mm256_loadu_si256((const __m256i *)(bytes + i + 32)));
        c = _mm256_xor_si256(c, _mm256_loadu_si256((const __m256i *)(bytes + i + 64)));
        d = _mm256_xor_si256(d, _mm256_loadu_si256((const __m256i *)(bytes + i + 96)));
    }
    _mm256_storeu_si256((__m256i *)words, _mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d)));
#else
    for (long i = 0; i < count; i += 64) {
        uint64_t here[8];
        memcpy(here, bytes + i, sizeof here);
        for (int word = 0; word < 8; word++)
            words[word] ^= here[word];
    }
#endif
    for (int word = 0; word < 8; word++)
        folded ^= words[word];
    call->folded[unit] = folded;
}
