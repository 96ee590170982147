/* Pages of a mapped file that are lost while they are read, noted instead of ending the process.
 *
 * The handler of SIGBUS must not lock or allocate: the guarded mappings lie in a fixed table, whose entries are in use while their
 * base is not 0. It is installed with the first guard and stays. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SF_GUARDS = 64, SF_ZEROS = 2 << 20 };
static struct { uintptr_t base; size_t bytes; long lost; } sf_guards[SF_GUARDS];
static pthread_mutex_t sf_guarding = PTHREAD_MUTEX_INITIALIZER;
static struct sigaction sf_before;
static uintptr_t sf_page = 0;

static void sf_on_bus(int number, siginfo_t *info, void *context) {
    uintptr_t at = (uintptr_t)info->si_addr;
    int saved = errno;
    (void)number, (void)context;
    for (int i = 0; i < SF_GUARDS; i++) {
        uintptr_t base = __atomic_load_n(&sf_guards[i].base, __ATOMIC_ACQUIRE);
        if (info->si_code <= 0 || base == 0 || at < base || at - base >= sf_guards[i].bytes) continue;
        long none = -1;
        uintptr_t page = at / sf_page * sf_page, rest = base + sf_guards[i].bytes - page;
        size_t zeros = rest < SF_ZEROS ? rest : SF_ZEROS;   /* many at once: each piece may cost a mapping */
        __atomic_compare_exchange_n(&sf_guards[i].lost, &none, (long)(at - base), 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
        if (mmap((void *)page, zeros, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED) {
            errno = saved;
            return;
        }
    }
    sigaction(SIGBUS, &sf_before, NULL);                    /* the access is repeated, and theirs */
    if (info->si_code <= 0) raise(number);                  /* unless it was sent, and there is no access */
    errno = saved;
}

/* The number of a mapping whose lost pages are noted from now on, or -1 when there are too many. */
static int sf_guard(void *base, size_t bytes) {
    int number = -1;
    pthread_mutex_lock(&sf_guarding);
    if (sf_page == 0) {
        struct sigaction action = {0};
        action.sa_sigaction = sf_on_bus;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sf_page = sysconf(_SC_PAGESIZE);
        sigaction(SIGBUS, &action, &sf_before);
    }
    for (int i = 0; i < SF_GUARDS && number < 0; i++) {
        if (sf_guards[i].base != 0) continue;
        sf_guards[i].bytes = bytes;
        sf_guards[i].lost = -1;
        __atomic_store_n(&sf_guards[i].base, (uintptr_t)base, __ATOMIC_RELEASE);
        number = i;
    }
    pthread_mutex_unlock(&sf_guarding);
    return number;
}

static void sf_unguard(int number) {
    if (number >= 0) __atomic_store_n(&sf_guards[number].base, 0, __ATOMIC_RELEASE);
}

static long sf_lost(int number) {
    return number < 0 ? -1 : __atomic_load_n(&sf_guards[number].lost, __ATOMIC_SEQ_CST);
}
