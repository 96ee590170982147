/* Quantised activations, as kernels hand them to each other. */
#ifndef SF_QUANTIZED_H
#define SF_QUANTIZED_H
#include <stdint.h>

/* row m of codes starts at m * padded, of scales and corrections at m * padded / 32 */
struct sf_quantized {
    int8_t *codes;
    float *scales;
    int32_t *corrections; /* -128 * sum of the group's codes: undoes the + 128 of the weights */
    long padded;
};
#endif
